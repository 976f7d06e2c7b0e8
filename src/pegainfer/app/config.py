"""Options of the model on its device. The command line is derived from this class: defaults stand only here.

The scheduler's own options are engine/config.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pegainfer.contract.errors import ConfigError

ACTIVATIONS = ("auto", "int8", "f32")
KV_DTYPES = ("auto", "f32", "f16")
BACKENDS = ("cpu", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What is loaded, how it computes and how much it may hold."""

    max_model_len: int | None = field(
        default=None, metadata={"help": "Tokens of a sequence, prompt and answer; default: the model's own."}
    )
    threads: int | None = field(
        default=None, metadata={"help": "Threads that compute; default: the cores this process may use."}
    )
    isa: str | None = field(
        default=None, metadata={"help": "Kernels' instruction set; default: the best this processor has."}
    )
    activation: str = field(
        default="auto",
        metadata={
            "help": "Activations of quantised layers: int8 (faster), f32 (exact); auto: int8 if quantised."
        },
    )
    kv_dtype: str = field(
        default="auto",
        metadata={
            "help": "Storage of keys and values: f16 (half the memory), f32 (exact); auto: as activation."
        },
    )
    kv_cache_memory: int | None = field(
        default=None,
        metadata={
            "help": "Memory for keys and values, such as 512MiB; default: a quarter of the free memory, "
            "1 GiB at most, or what one sequence needs.",
            "parse": "bytes",
        },
    )
    backend: str = field(
        default="cpu", metadata={"help": "cpu, or reference: NumPy, slow, what the others are compared with."}
    )

    @property
    def kv_format(self) -> str:
        """kv_dtype with auto decided: f32 where exact activations are asked for, else f16.

        Reading f16 is what makes a long context quick: 1.6 to 2 times as many tokens a second from 2,000 on.
        """
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return "f32" if self.activation == "f32" else "f16"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "threads", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"bad {name}", expected="a whole number from 1", got=repr(value))
        for name, allowed in (("activation", ACTIVATIONS), ("kv_dtype", KV_DTYPES), ("backend", BACKENDS)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"bad {name}", expected=" or ".join(allowed), got=repr(value))
