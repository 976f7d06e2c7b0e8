"""What a llama model's config says, read from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegainfer.contract.errors import ConfigError, UnsupportedError

MAX_DIM = 1 << 20  # of any width; far above real models, and keeps products of sizes within 63 bits
MAX_HEAD_DIM = 256  # what the attention kernels are built for
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one model; every field was checked for type, range and mutual fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # rope_type 'linear' or 'llama3' with its numbers
    max_position_embeddings: int  # tokens that the model was trained for
    tie_word_embeddings: bool  # lm_head is the embedding's table

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def half_head_dim(self) -> int:
        return self.head_dim // 2

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> LlamaConfig:
        """From a parsed config.json; `where` names it in errors.

        Defaults are those of transformers' LlamaConfig, but sizes must be there. Raises ConfigError and
        UnsupportedError.
        """
        f = _Fields(config, where)
        for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
            f.refuse(key, f.boolean(key, False), expected="false")
        f.refuse("hidden_act", f.text("hidden_act", "silu") != "silu", expected="silu")
        f.refuse("quantization_config", config.get("quantization_config") is not None, expected="none")
        # transformers 5 writes rope_parameters; older files have rope_theta beside rope_scaling.
        rope = f.mapping("rope_parameters") or f.mapping("rope_scaling") or {}
        theta = _Fields(rope if "rope_theta" in rope else config, where).number("rope_theta", 1e4, least=1.0)
        hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
        if "head_dim" not in config or config["head_dim"] is None:
            f.require("hidden_size", hidden % heads == 0, f"a multiple of num_attention_heads {heads}")
        return cls(
            vocab_size=f.integer("vocab_size", most=1 << 24),
            hidden_size=hidden,
            intermediate_size=f.integer("intermediate_size"),
            num_layers=f.integer("num_hidden_layers", most=1024),
            num_heads=heads,
            num_kv_heads=_kv_heads(f, "num_key_value_heads", heads),
            head_dim=_head_dim(f, "head_dim", hidden // heads),
            norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
            rope_theta=theta,
            rope_scaling=_rope_scaling(rope, where),
            max_position_embeddings=f.integer("max_position_embeddings", 2048, most=1 << 30),
            tie_word_embeddings=f.boolean("tie_word_embeddings", False),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], where: str, *, vocab_size: int, tied: bool
    ) -> LlamaConfig:
        """From `llama.*` metadata.

        Args:
            vocab_size: rows of token_embd.weight, for files without `llama.vocab_size`.
            tied: whether the file lacks output.weight, which is how GGUF says it.
        """
        prefix = "llama."
        f = _Fields({k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}, where, prefix)
        f.refuse("expert_count", f.integer("expert_count", 0, least=0) > 0, expected="0 (a dense model)")
        hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
        head_dim = _head_dim(f, "attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            f.refuse(key, f.integer(key, head_dim) != head_dim, expected=f"the head size {head_dim}")
        kind = f.text("rope.scaling.type", "none")
        scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
        if kind == "linear":
            scaling["factor"] = f.number("rope.scaling.factor")
        return cls(
            vocab_size=f.integer("vocab_size", vocab_size, most=1 << 24),
            hidden_size=hidden,
            intermediate_size=f.integer("feed_forward_length"),
            num_layers=f.integer("block_count", most=1024),
            num_heads=heads,
            num_kv_heads=_kv_heads(f, "attention.head_count_kv", heads),
            head_dim=head_dim,
            norm_eps=f.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope_theta=f.number("rope.freq_base", 1e4, least=1.0),
            rope_scaling=_rope_scaling(scaling, where),
            max_position_embeddings=f.integer("context_length", most=1 << 30),
            tie_word_embeddings=tied,
        )


def _kv_heads(f: _Fields, key: str, heads: int) -> int:
    kv_heads = f.integer(key, heads)
    f.require(key, heads % kv_heads == 0, f"a divisor of the {heads} query heads")
    return kv_heads


def _head_dim(f: _Fields, key: str, derived: int) -> int:
    head_dim = f.integer(key, derived)
    f.refuse(
        key, head_dim % 2 != 0 or head_dim > MAX_HEAD_DIM, expected=f"an even head size ≤ {MAX_HEAD_DIM}"
    )
    return head_dim


def _rope_scaling(rope: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """The scaling's checked numbers, None for none. Raises ConfigError and UnsupportedError."""
    f = _Fields(rope, where, "rope scaling: ")
    kind = f.text("rope_type", f.text("type", "default"))
    f.refuse(
        "rope_type",
        kind not in ("default", "linear", "llama3"),
        expected="default, linear or llama3",
        got=kind,
    )
    f.refuse("partial_rotary_factor", f.number("partial_rotary_factor", 1.0) != 1.0, expected=1.0)
    if kind == "default":
        return None
    keys = _LLAMA3_KEYS if kind == "llama3" else ("factor",)
    scaling = {key: f.number(key) for key in keys}
    if kind == "llama3":
        low = scaling["low_freq_factor"]
        f.require("high_freq_factor", scaling["high_freq_factor"] > low, f"above low_freq_factor {low}")
    return {"rope_type": kind, **scaling}


class _Fields:
    """Typed access to a mapping that came from outside. A key that is null counts as absent."""

    def __init__(self, source: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._source = source
        self._where = where
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_DIM) -> int:
        value = self._get(key, default)
        self.require(key, type(value) is int and least <= value <= most, f"an integer from {least} to {most}")
        return int(value)

    def number(
        self, key: str, default: float | None = None, *, least: float = 0.0, most: float = math.inf
    ) -> float:
        """A finite number above zero within [least, most]."""
        value = self._get(key, default)
        fits = type(value) in (int, float) and math.isfinite(value) and value > 0 and least <= value <= most
        self.require(key, fits, f"a number above 0, from {least:g} to {most:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        self.require(key, type(value) is bool, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        self.require(key, type(value) is str, "a string")
        return str(value)

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        value = self._get(key, {})
        self.require(key, isinstance(value, Mapping), "an object")
        return value or None

    def require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(
                f"model config: {self._prefix}{key} is wrong",
                expected=expected,
                got=f"{self._source.get(key)!r:.80}",
                where=self._where,
            )

    def refuse(self, key: str, wrong: bool, *, expected: object, got: object = None) -> None:
        """Raises UnsupportedError for a feature that exists in the field but not in this model line."""
        if wrong:
            raise UnsupportedError(
                f"llama: {self._prefix}{key} is not supported",
                expected=expected,
                got=f"{self._source.get(key) if got is None else got!r:.80}",
                where=self._where,
            )

    def _get(self, key: str, default: Any) -> Any:
        value = self._source.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"model config: {self._prefix}{key} is missing", where=self._where)
        return value
