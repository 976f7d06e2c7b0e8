"""Sizes of a toy hybrid model, read from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegainfer.ops.config import head_size, kv_heads
from pegainfer.runtime.weights.fields import Fields


@dataclass(frozen=True)
class ToyConfig:
    """Sizes and constants of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    delta_key_heads: int
    delta_heads: int  # value heads, each with a state [delta_dim, delta_dim]
    delta_dim: int
    conv_width: int  # taps of the causal convolution
    snapshot_every: int  # tokens between states that are kept for prefix reuse
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def delta_size(self) -> int:
        """Channels of the mixer's values."""
        return self.delta_heads * self.delta_dim

    @property
    def conv_size(self) -> int:
        """Channels of q, k and v of the mixer."""
        return 2 * self.delta_key_heads * self.delta_dim + self.delta_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> ToyConfig:
        """From a parsed config.json; `where` names it in errors. Raises ConfigError, UnsupportedError."""
        f = Fields(config, where, line="toy")
        heads = f.integer("num_attention_heads")
        return cls(
            vocab_size=f.integer("vocab_size"),
            hidden_size=f.integer("hidden_size"),
            intermediate_size=f.integer("intermediate_size"),
            num_layers=f.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "num_key_value_heads", heads, heads),
            head_dim=head_size(f, "head_dim", 64),
            delta_key_heads=f.integer("delta_key_heads"),
            delta_heads=f.integer("delta_heads"),
            delta_dim=f.integer("delta_dim"),
            conv_width=f.integer("conv_width"),
            snapshot_every=f.integer("snapshot_every"),
            norm_eps=f.number("rms_norm_eps", 1e-6),
            max_position_embeddings=f.integer("max_position_embeddings"),
            tie_word_embeddings=f.boolean("tie_word_embeddings", True),
        )
