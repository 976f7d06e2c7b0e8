"""Sampling parameters of requests that leave them out, by route.

The offline API reads them, too, so nothing of the web stack is imported here.
"""

from __future__ import annotations

import functools

import msgspec

from pegainfer.contract.request import NUMBERS, SamplingParams


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What holds where a request says nothing. `max_tokens` None: up to the context's end."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @functools.cached_property
    def numbers(self) -> dict[str, float]:
        """The default of each parameter in `NUMBERS`: the engine's own where this class has none."""
        engine = SamplingParams()
        return {name: getattr(self, name, getattr(engine, name)) for name in NUMBERS}


# The defaults that say which of the likeliest tokens are drawn from.
CUTS = ("top_k", "top_p", "min_p")
COMPLETION_DEFAULTS = SamplingDefaults(max_tokens=128, temperature=0.0, top_k=50)
OPENAI_COMPLETION_DEFAULTS = SamplingDefaults(max_tokens=16)
CHAT_DEFAULTS = SamplingDefaults()
