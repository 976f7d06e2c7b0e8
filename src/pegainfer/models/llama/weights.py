"""Llama's weights: one table of names and shapes, and how the two file formats are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.errors import ModelFileError
from pegainfer.models.llama.config import LINE, LlamaConfig
from pegainfer.ops.quantization import plan_checkpoint
from pegainfer.ops.ranks import ONE_RANK, TensorRank, config_of_rank
from pegainfer.ops.rope import inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.ops.weights import (
    Rows,
    WeightTable,
    embedding_in_gguf,
    entry,
    in_layer,
    plan_weights,
    read_vector,
)
from pegainfer.runtime.weights.gguf import GGUF
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]


def _halves(heads: str) -> Rows:
    """Rows of q or k in a GGUF file, in our order; `heads` is the field that counts their heads.

    llama.cpp's converter interleaves the halves of each head (row 2j is j, row 2j + 1 is D/2 + j) for its
    rotation of neighbouring pairs. The forward rotates halves, as Hugging Face does.
    """

    def rows(config: LlamaConfig) -> list[range]:
        starts = range(0, getattr(config, heads) * config.head_dim, config.head_dim)
        return [range(start + half, start + config.head_dim, 2) for start in starts for half in (0, 1)]

    return rows


Q_ROWS, K_ROWS = _halves("num_heads"), _halves("num_kv_heads")
TABLE = WeightTable(
    line=LINE,
    embed=entry("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    others=(entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),),
    head=entry("lm_head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size")),
    layer=(
        in_layer("attn_norm", "input_layernorm", "attn_norm", ("hidden_size",)),
        in_layer(
            "wq",
            "self_attn.q_proj",
            "attn_q",
            ("q_size", "hidden_size"),
            gguf_rows=_halves("num_heads"),
            shard=0,
        ),
        in_layer(
            "wk",
            "self_attn.k_proj",
            "attn_k",
            ("kv_size", "hidden_size"),
            gguf_rows=_halves("num_kv_heads"),
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
        in_layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size"), shard=1),
        in_layer("mlp_norm", "post_attention_layernorm", "ffn_norm", ("hidden_size",)),
        in_layer("w_gate", "mlp.gate_proj", "ffn_gate", ("intermediate_size", "hidden_size"), shard=0),
        in_layer("w_up", "mlp.up_proj", "ffn_up", ("intermediate_size", "hidden_size"), shard=0),
        in_layer("w_down", "mlp.down_proj", "ffn_down", ("hidden_size", "intermediate_size"), shard=1),
    ),
)
ROPE_FREQS = "rope_freqs.weight"  # GGUF: divisors of the frequencies, [D/2]; how it stores llama3 scaling


class LlamaWeights(msgspec.Struct, frozen=True):
    """Where a model's weights lie in its file.

    Args:
        config: with the vocabulary and tying that the file shows, and the sizes that one rank has.
        tensors: by the forward's name; valid while the file is open.
        rope_divisors: [D/2] float32 or None; each frequency is divided by its own.
    """

    config: LlamaConfig
    tensors: Mapping[str, Weight]
    rope_divisors: Array | None = None

    @property
    def formats(self) -> dict[str, str]:
        return {name: w.dtype for name, w in self.tensors.items()}

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table: [num_positions, D] f32."""
        c = self.config
        freqs = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        if self.rope_divisors is not None:
            freqs = freqs / self.rope_divisors
        return rotation_table(num_positions, freqs)


def load_gguf(file: GGUF, at: TensorRank = ONE_RANK) -> LlamaWeights:
    """Reads config and weights of an open GGUF file.

    Raises ConfigError, ModelFileError, UnsupportedError, and OpError where a weight does not divide.
    """
    rows, tied = embedding_in_gguf(TABLE, file)
    config = LlamaConfig.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    own = config_of_rank(config, at)
    tensors = plan_weights(TABLE, config, file, "gguf", ignored=[ROPE_FREQS], at=at)
    divisors = None
    if ROPE_FREQS in file.tensors:
        divisors = read_vector(file, ROPE_FREQS, config.half_head_dim)
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ModelFileError(f"tensor {ROPE_FREQS}: divisors must be above 0", where=file.path)
    return LlamaWeights(own, tensors, divisors)


def load_safetensors(config: LlamaConfig, file: TensorFile, at: TensorRank = ONE_RANK) -> LlamaWeights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises as `load_gguf`."""
    # Old Llama 2 files carry the rotation's frequencies, which follow from the config.
    ignored = ["model.layers.*.self_attn.rotary_emb.inv_freq"]
    own = config_of_rank(config, at)
    return LlamaWeights(
        own, plan_checkpoint(TABLE, config, file, config.quantization, ignored=ignored, at=at)
    )
