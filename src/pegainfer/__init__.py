"""pegainfer: an LLM inference engine that a Python programmer can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from pegainfer.app.lora import LoRARequest
    from pegainfer.app.offline import LLM
    from pegainfer.app.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import pegainfer` must stay cheap for the command line.
    if name == "LLM":
        from pegainfer.app.offline import LLM

        return LLM
    if name == "LoRARequest":
        from pegainfer.app.lora import LoRARequest

        return LoRARequest
    if name == "SamplingParams":
        from pegainfer.app.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pegainfer' has no attribute {name!r}")
