"""What a Qwen3-MoE model's config says, read from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.ops.config import (
    gguf_fields,
    gguf_rope,
    gguf_whole_head,
    head_size,
    hf_kv_heads,
    hf_rope,
    kv_heads,
    serve_only,
    served_length,
)
from pegainfer.ops.quantization import Quantization, read_quantization
from pegainfer.ops.ranks import DENSE, HEADS, TensorRank, config_of_rank
from pegainfer.runtime.weights.fields import Fields

LINE = "qwen3_moe"
ARCHITECTURE = "qwen3moe"  # what GGUF calls it
# Keys of GGUF that this line reads beside those of dense models.
GGUF_EXPERTS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"})
MOST_EXPERTS = 1 << 14
ROPE_KINDS = ("default", "yarn")


class Qwen3MoeConfig(msgspec.Struct, frozen=True):
    """Sizes and constants of one model; every field was checked for type, range and mutual fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    expert_size: int  # of one expert: moe_intermediate_size
    num_experts: int
    experts_per_token: int
    norm_topk_prob: bool  # whether the weights of a token's experts are made to sum to 1
    dense_layers: frozenset[int]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of its own: hidden_size / num_heads is another number in most sizes
    norm_eps: float  # of all norms, those of heads included
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # rope_type 'yarn' with its numbers
    max_position_embeddings: int  # tokens that the model was trained for, or that yarn stretches it to
    tie_word_embeddings: bool  # lm_head is the embedding's table
    quantization: Quantization | None = None  # of a checkpoint; GGUF says it tensor by tensor
    first_expert: int = 0
    held_experts: int = 0  # of this rank, from first_expert on; 0: all

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def local_experts(self) -> int:
        """Experts whose matrices this rank has."""
        return self.held_experts or self.num_experts

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one feed-forward block in place of experts."""
        return layer in self.dense_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> Qwen3MoeConfig:
        """From a parsed config.json; `where` names it in errors.

        Defaults are those of transformers' Qwen3MoeConfig, but sizes must be there. Raises ConfigError and
        UnsupportedError.
        """
        f = Fields(config, where, line=LINE)
        serve_only(f, {"hidden_act": "silu"}, off=("attention_bias", "use_sliding_window"))
        layer_types = set(f.texts("layer_types"))
        f.refuse(
            "layer_types", not layer_types <= {"full_attention"}, expected="full_attention in all layers"
        )
        heads = f.integer("num_attention_heads")
        trained = f.integer("max_position_embeddings", 32768, most=1 << 30)
        theta, scaling = hf_rope(f, ROPE_KINDS, trained)
        layers = f.integer("num_hidden_layers", most=1024)
        experts = f.integer("num_experts", most=MOST_EXPERTS)
        dense = _dense_layers(f, layers)
        return cls(
            vocab_size=f.integer("vocab_size", most=1 << 24),
            hidden_size=f.integer("hidden_size"),
            intermediate_size=f.integer("intermediate_size", None if dense else 6144),
            expert_size=f.integer("moe_intermediate_size"),
            num_experts=experts,
            experts_per_token=f.integer("num_experts_per_tok", most=experts),
            norm_topk_prob=f.boolean("norm_topk_prob", False),
            dense_layers=dense,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=hf_kv_heads(f, config, heads),
            head_dim=head_size(f, "head_dim", 128),
            norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            tie_word_embeddings=f.boolean("tie_word_embeddings", False),
            quantization=read_quantization(f),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], where: str, *, vocab_size: int, tied: bool
    ) -> Qwen3MoeConfig:
        """From `qwen3moe.*` metadata. All layers have experts: the converter writes no others.

        Args:
            vocab_size: rows of token_embd.weight, for files without `qwen3moe.vocab_size`.
            tied: whether the file lacks output.weight, which is how GGUF says it.
        """
        f = gguf_fields(metadata, ARCHITECTURE, where, LINE, GGUF_EXPERTS)
        hidden, heads = f.integer("embedding_length"), f.integer("attention.head_count")
        head_dim = gguf_whole_head(f, hidden // heads)
        trained = f.integer("context_length", most=1 << 30)
        theta, scaling = gguf_rope(f, ROPE_KINDS)
        experts = f.integer("expert_count", most=MOST_EXPERTS)
        expert_size = f.integer("expert_feed_forward_length")
        return cls(
            vocab_size=f.integer("vocab_size", vocab_size, most=1 << 24),
            hidden_size=hidden,
            intermediate_size=f.integer("feed_forward_length", expert_size),
            expert_size=expert_size,
            num_experts=experts,
            experts_per_token=f.integer("expert_used_count", most=experts),
            norm_topk_prob=True,
            dense_layers=frozenset(),
            num_layers=f.integer("block_count", most=1024),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "attention.head_count_kv", heads, heads),
            head_dim=head_dim,
            norm_eps=f.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            tie_word_embeddings=tied,
        )


def of_rank(config: Qwen3MoeConfig, at: TensorRank) -> Qwen3MoeConfig:
    """The sizes of a rank, which has a share of every expert or some experts. Raises ConfigError."""
    dense = DENSE if config.dense_layers else HEADS
    return config_of_rank(config, at, dense, {"expert_size": "units of an expert"})


def _dense_layers(f: Fields, layers: int) -> frozenset[int]:
    """Layers without experts: those named, and all but every `decoder_sparse_step`-th."""
    step = f.integer("decoder_sparse_step", 1)
    named = f.integers("mlp_only_layers", most=1024)
    dense = frozenset(i for i in range(layers) if i in named or (i + 1) % step)
    f.require("mlp_only_layers", len(dense) < layers, "at least one layer with experts")
    return dense
