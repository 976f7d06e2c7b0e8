"""pegainfer: an LLM inference engine that a Python programmer can read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "LoRARequest",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from pegainfer.app.async_llm import AsyncEngineArgs, AsyncLLM
    from pegainfer.app.lora import LoRARequest
    from pegainfer.app.offline import LLM
    from pegainfer.app.sampling_params import RequestOutputKind, SamplingParams
    from pegainfer.app.structured import StructuredOutputsParams

# Loaded on first use: `import pegainfer` must stay cheap for the command line.
_MODULES = {
    "AsyncEngineArgs": "async_llm",
    "AsyncLLM": "async_llm",
    "LLM": "offline",
    "LoRARequest": "lora",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pegainfer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pegainfer.app.{_MODULES[name]}"), name)
