"""pegainfer: an LLM inference engine that a Python programmer can read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM", "RequestOutputKind", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pegainfer.app.async_llm import AsyncEngineArgs, AsyncLLM
    from pegainfer.app.offline import LLM
    from pegainfer.app.sampling_params import RequestOutputKind, SamplingParams

# Loaded on first use: `import pegainfer` must stay cheap for the command line.
_MODULES = {
    "AsyncEngineArgs": "async_llm",
    "AsyncLLM": "async_llm",
    "LLM": "offline",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pegainfer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pegainfer.app.{_MODULES[name]}"), name)
