"""Qwen3-MoE's weights: one table of names and shapes, and how the two file formats are read.

Checkpoints hold each expert's matrices by themselves, GGUF one stack of each kind; here they are stacks.
llama.cpp's converter permutes no rows of this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.models.qwen3_moe.config import LINE, Qwen3MoeConfig, of_rank
from pegainfer.ops.quantization import plan_checkpoint
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.rope import attention_factor, inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.ops.weights import Entry, InFile, WeightTable, embedding_in_gguf, entry, in_layer, plan_weights
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

OF_KV_HEADS: Any = {"shard": 0, "most_shards": "num_kv_heads"}
WIDE, NARROW = ("intermediate_size", "hidden_size"), ("hidden_size", "intermediate_size")


def _is_dense(config: Qwen3MoeConfig, layer: int) -> bool:
    return config.is_dense(layer)


def _has_experts(config: Qwen3MoeConfig, layer: int) -> bool:
    return not config.is_dense(layer)


def _experts(name: str, hf: str, gguf: str, shape: tuple[str, str], shard: int) -> Entry:
    """A stack of all experts' matrices of one kind. `shard`: the axis of units, which ranks divide."""
    each = InFile(f"model.layers.{{}}.mlp.experts.{{expert}}.{hf}.weight")
    stack = InFile(f"blk.{{}}.{gguf}.weight")
    shape_of_all = ("local_experts", *shape)
    return Entry(f"layers.{{}}.{name}", shape_of_all, each, stack, shard, _has_experts, experts=True)


TABLE = WeightTable(
    line=LINE,
    embed=entry("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    others=(entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),),
    head=entry("lm_head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size")),
    layer=(
        in_layer("attn_norm", "input_layernorm", "attn_norm", ("hidden_size",)),
        in_layer("wq", "self_attn.q_proj", "attn_q", ("q_size", "hidden_size"), shard=0),
        in_layer("wk", "self_attn.k_proj", "attn_k", ("kv_size", "hidden_size"), **OF_KV_HEADS),
        in_layer("wv", "self_attn.v_proj", "attn_v", ("kv_size", "hidden_size"), **OF_KV_HEADS),
        in_layer("q_norm", "self_attn.q_norm", "attn_q_norm", ("head_dim",)),
        in_layer("k_norm", "self_attn.k_norm", "attn_k_norm", ("head_dim",)),
        in_layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size"), shard=1),
        in_layer("mlp_norm", "post_attention_layernorm", "ffn_norm", ("hidden_size",)),
        in_layer("w_router", "mlp.gate", "ffn_gate_inp", ("num_experts", "hidden_size"), when=_has_experts),
        _experts("w_gate", "gate_proj", "ffn_gate_exps", ("expert_size", "hidden_size"), shard=1),
        _experts("w_up", "up_proj", "ffn_up_exps", ("expert_size", "hidden_size"), shard=1),
        _experts("w_down", "down_proj", "ffn_down_exps", ("hidden_size", "expert_size"), shard=2),
        in_layer("w_gate", "mlp.gate_proj", "ffn_gate", WIDE, shard=0, when=_is_dense),
        in_layer("w_up", "mlp.up_proj", "ffn_up", WIDE, shard=0, when=_is_dense),
        in_layer("w_down", "mlp.down_proj", "ffn_down", NARROW, shard=1, when=_is_dense),
    ),
)


class Qwen3MoeWeights(msgspec.Struct, frozen=True):
    """Where a model's weights lie in its file.

    Args:
        config: with the vocabulary and tying that the file shows, and the sizes that one rank has.
        tensors: by the forward's name; valid while the file is open.
    """

    config: Qwen3MoeConfig
    tensors: Mapping[str, Weight]

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table with yarn's attention factor in it: [num_positions, D] f32."""
        c = self.config
        freqs = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        return rotation_table(num_positions, freqs, attention_factor(c.rope_scaling))


def load_gguf(file: GGUFFile, at: TensorRank = ONE_RANK) -> Qwen3MoeWeights:
    """Reads config and weights of an open GGUF file.

    Raises ConfigError, ModelFileError, UnsupportedError, and OpError where a weight does not divide.
    """
    rows, tied = embedding_in_gguf(TABLE, file)
    config = Qwen3MoeConfig.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return Qwen3MoeWeights(own, plan_weights(TABLE, config, file, "gguf", at=at))


def load_safetensors(config: Qwen3MoeConfig, file: TensorFile, at: TensorRank = ONE_RANK) -> Qwen3MoeWeights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises as `load_gguf`."""
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return Qwen3MoeWeights(own, plan_checkpoint(TABLE, config, file, config.quantization, at=at))
