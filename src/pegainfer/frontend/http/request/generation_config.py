"""What a model itself says of sampling: generation_config.json beside it, or the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import INT32_MAX, NUMBERS, Number
from pegainfer.frontend.http.request.sampling_defaults import CHAT_DEFAULTS, SamplingDefaults

_RANGES = {**NUMBERS, "max_tokens": Number("", 1, INT32_MAX, whole=True)}
# Other names that fields have in generation_config.json, and in GGUF files after "general.sampling.".
_NAMES = {"max_tokens": "max_new_tokens"}
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat", "max_tokens": "max_new_tokens"}
# Field → its keys there.
_KEYS = {
    name: (_NAMES.get(name, name), f"general.sampling.{_GGUF_NAMES.get(name, name)}")
    for name in SamplingDefaults.__struct_fields__
}


def generation_defaults(given: Mapping[str, Any]) -> SamplingDefaults:
    """Chat's defaults with what the model says of them. Raises as `stated`."""
    return msgspec.structs.replace(CHAT_DEFAULTS, **stated(given))


def stated(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the model says, by the names of requests. `do_sample: false` means greedy.

    Raises ConfigError for a value that no request may have.
    """
    found: dict[str, Any] = {}
    for name, keys in _KEYS.items():
        number = _RANGES[name]
        key = next((key for key in keys if given.get(key) is not None), None)
        if key is None:
            continue
        value = given[key]
        fits = isinstance(value, int) if number.whole else isinstance(value, int | float)
        if isinstance(value, bool) or not fits or not number.in_request(value):
            raise ConfigError(
                f"the model's own {key} is out of its range", got=value,
                expected=f"{'above ' if number.above else ''}{number.low:g} to {number.high:g}",
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
    known = {*(key for keys in _KEYS.values() for key in keys), "do_sample"}
    wrong = sorted(set(value) - known) if isinstance(value, Mapping) else [type(value).__name__]
    if wrong:
        raise ConfigError(
            "no sampling defaults",
            expected="a JSON object of " + " ".join(sorted(k for k in known if "." not in k)),
            got=" ".join(wrong)[:200], where=where,
        )  # fmt: skip
    return dict(value)
