"""What a model itself says of sampling: generation_config.json beside it, or the metadata of a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import INT32_MAX, NUMBERS, Number
from pegainfer.frontend.http.fields import CHAT_DEFAULTS, SamplingDefaults

_RANGES = {**NUMBERS, "max_tokens": Number("", 1, INT32_MAX, whole=True)}
# Other names that fields have in generation_config.json, and in GGUF files after "general.sampling.".
_NAMES = {"max_tokens": "max_new_tokens"}
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat", "max_tokens": "max_new_tokens"}


def generation_defaults(given: Mapping[str, Any]) -> SamplingDefaults:
    """Chat's defaults with what the model says of them. `do_sample: false` means greedy.

    Raises ConfigError for a value that no request may have.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingDefaults):
        name, number = field.name, _RANGES[field.name]
        keys = _NAMES.get(name, name), f"general.sampling.{_GGUF_NAMES.get(name, name)}"
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
    return dataclasses.replace(CHAT_DEFAULTS, **found)
