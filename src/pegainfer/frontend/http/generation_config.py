"""What a model itself says of sampling: generation_config.json beside it, or the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegainfer.contract.errors import ConfigError

if TYPE_CHECKING:
    from pegainfer.frontend.http.fields import SamplingDefaults

INT32_MAX = 2**31 - 1
# Name here → names there, and the bounds that a request's field has.
_FIELDS: dict[str, tuple[tuple[str, str], float, float]] = {
    "temperature": (("temperature", "general.sampling.temp"), 0.0, 100.0),
    "top_k": (("top_k", "general.sampling.top_k"), -1, INT32_MAX),
    "top_p": (("top_p", "general.sampling.top_p"), 1e-9, 1.0),
    "min_p": (("min_p", "general.sampling.min_p"), 0.0, 1.0),
    "repetition_penalty": (("repetition_penalty", "general.sampling.penalty_repeat"), 0.01, 100.0),
    "max_tokens": (("max_new_tokens", "general.sampling.max_new_tokens"), 1, INT32_MAX),
}
_WHOLE = ("top_k", "max_tokens")


def generation_defaults(given: Mapping[str, Any]) -> SamplingDefaults:
    """Chat's defaults with what the model says of them. Raises as `stated`."""
    # It comes with the web stack, which the offline API does without.
    from pegainfer.frontend.http.fields import CHAT_DEFAULTS, SamplingDefaults

    return SamplingDefaults(**{**{f: getattr(CHAT_DEFAULTS, f) for f in _FIELDS}, **stated(given)})


def stated(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the model says, by the names of requests. `do_sample: false` means greedy.

    Raises ConfigError for a value that no request may have.
    """
    found: dict[str, Any] = {}
    for name, (keys, low, high) in _FIELDS.items():
        key = next((key for key in keys if given.get(key) is not None), None)
        if key is None:
            continue
        value = given[key]
        fits = isinstance(value, int) if name in _WHOLE else isinstance(value, int | float)
        if isinstance(value, bool) or not fits or not low <= value <= high:
            raise ConfigError(
                f"the model's own {key} is out of its range", expected=f"{low:g} to {high:g}", got=value,
                where="generation_config.json or general.sampling", remedy="--generation-config none",
            )  # fmt: skip
        found[name] = max(value, 0) if name == "top_k" else value
    if given.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def overrides(text: str | Mapping[str, Any]) -> dict[str, Any]:
    """The object of --override-generation-config, as JSON or as it is; empty for an empty text.

    Raises ConfigError.
    """
    where = "--override-generation-config"
    try:
        value = json.loads(text) if isinstance(text, str) and text else text or {}
    except (ValueError, RecursionError) as e:
        raise ConfigError("not valid JSON", got=f"{e!s:.100}", where=where) from None
    known = {*(name for names, _, _ in _FIELDS.values() for name in names), "do_sample"}
    wrong = sorted(set(value) - known) if isinstance(value, Mapping) else [type(value).__name__]
    if wrong:
        raise ConfigError(
            "no sampling defaults",
            expected="a JSON object of " + " ".join(sorted(k for k in known if "." not in k)),
            got=" ".join(wrong)[:200], where=where,
        )  # fmt: skip
    return dict(value)
