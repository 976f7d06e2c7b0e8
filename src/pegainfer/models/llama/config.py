"""What a llama model's config says, read from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.ops.config import (
    gguf_fields,
    gguf_rope,
    gguf_whole_head,
    head_size,
    hf_rope,
    kv_heads,
    serve_only,
)
from pegainfer.ops.quantization import Quantization, read_quantization
from pegainfer.runtime.weights.fields import Fields

LINE = "llama"
ROPE_KINDS = ("default", "linear", "llama3")
GGUF_ROPE_KINDS = ("default", "linear")  # llama3's numbers come as a tensor of divisors


class LlamaConfig(msgspec.Struct, frozen=True):
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
    quantization: Quantization | None = None  # of a checkpoint; GGUF says it tensor by tensor

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
        f = Fields(config, where, line=LINE)
        serve_only(f, {"hidden_act": "silu"}, off=("attention_bias", "mlp_bias", "rope_interleaved"))
        trained = f.integer("max_position_embeddings", 2048, most=1 << 30)
        theta, scaling = hf_rope(f, ROPE_KINDS, trained)
        hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
        if not f.has("head_dim"):
            f.require("hidden_size", hidden % heads == 0, f"a multiple of num_attention_heads {heads}")
        return cls(
            vocab_size=f.integer("vocab_size", most=1 << 24),
            hidden_size=hidden,
            intermediate_size=f.integer("intermediate_size"),
            num_layers=f.integer("num_hidden_layers", most=1024),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "num_key_value_heads", heads, heads),
            head_dim=head_size(f, "head_dim", hidden // heads),
            norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=trained,
            tie_word_embeddings=f.boolean("tie_word_embeddings", False),
            quantization=read_quantization(f),
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
        f = gguf_fields(metadata, LINE, where, LINE)
        hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
        head_dim = gguf_whole_head(f, hidden // heads)
        theta, scaling = gguf_rope(f, GGUF_ROPE_KINDS)
        return cls(
            vocab_size=f.integer("vocab_size", vocab_size, most=1 << 24),
            hidden_size=hidden,
            intermediate_size=f.integer("feed_forward_length"),
            num_layers=f.integer("block_count", most=1024),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "attention.head_count_kv", heads, heads),
            head_dim=head_dim,
            norm_eps=f.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=f.integer("context_length", most=1 << 30),
            tie_word_embeddings=tied,
        )
