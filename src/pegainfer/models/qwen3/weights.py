"""Qwen3's weights: one table of names and shapes, and how the two file formats are read.

llama.cpp's converter permutes no rows of this architecture (its Qwen3Model inherits the plain mapping of
Qwen2Model, and the program rotates halves, LLAMA_ROPE_TYPE_NEOX); rows lie as in Hugging Face's files.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pegainfer.models.qwen3.config import LINE, Qwen3Config
from pegainfer.ops.quantization import plan_checkpoint
from pegainfer.ops.ranks import ONE_RANK, TensorRank, config_of_rank
from pegainfer.ops.rope import attention_factor, inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.ops.weights import WeightTable, embedding_in_gguf, entry, in_layer, plan_weights
from pegainfer.runtime.weights.gguf import GGUF
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

TABLE = WeightTable(
    line=LINE,
    embed=entry("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    others=(entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),),
    head=entry("lm_head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size")),
    layer=(
        in_layer("attn_norm", "input_layernorm", "attn_norm", ("hidden_size",)),
        in_layer("wq", "self_attn.q_proj", "attn_q", ("q_size", "hidden_size"), shard=0),
        in_layer(
            "wk",
            "self_attn.k_proj",
            "attn_k",
            ("kv_size", "hidden_size"),
            shard=0,
            most_shards="num_kv_heads",
        ),
        in_layer(
            "wv",
            "self_attn.v_proj",
            "attn_v",
            ("kv_size", "hidden_size"),
            shard=0,
            most_shards="num_kv_heads",
        ),
        in_layer("q_norm", "self_attn.q_norm", "attn_q_norm", ("head_dim",)),
        in_layer("k_norm", "self_attn.k_norm", "attn_k_norm", ("head_dim",)),
        in_layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size"), shard=1),
        in_layer("mlp_norm", "post_attention_layernorm", "ffn_norm", ("hidden_size",)),
        in_layer("w_gate", "mlp.gate_proj", "ffn_gate", ("intermediate_size", "hidden_size"), shard=0),
        in_layer("w_up", "mlp.up_proj", "ffn_up", ("intermediate_size", "hidden_size"), shard=0),
        in_layer("w_down", "mlp.down_proj", "ffn_down", ("hidden_size", "intermediate_size"), shard=1),
    ),
)


class Qwen3Weights(msgspec.Struct, frozen=True):
    """Where a model's weights lie in its file.

    Args:
        config: with the vocabulary and tying that the file shows, and the sizes that one rank has.
        tensors: by the forward's name; valid while the file is open.
    """

    config: Qwen3Config
    tensors: Mapping[str, Weight]

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table with yarn's attention factor in it: [num_positions, D] f32."""
        c = self.config
        freqs = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        return rotation_table(num_positions, freqs, attention_factor(c.rope_scaling))


def load_gguf(file: GGUF, at: TensorRank = ONE_RANK) -> Qwen3Weights:
    """Reads config and weights of an open GGUF file.

    Raises ConfigError, ModelFileError, UnsupportedError, and OpError where a weight does not divide.
    """
    rows, tied = embedding_in_gguf(TABLE, file)
    config = Qwen3Config.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    return Qwen3Weights(config_of_rank(config, at), plan_weights(TABLE, config, file, "gguf", at=at))


def load_safetensors(config: Qwen3Config, file: TensorFile, at: TensorRank = ONE_RANK) -> Qwen3Weights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises as `load_gguf`."""
    return Qwen3Weights(
        config_of_rank(config, at), plan_checkpoint(TABLE, config, file, config.quantization, at=at)
    )
