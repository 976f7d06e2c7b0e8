"""Llama's weights: one table of names and shapes, and how the two file formats are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.contract.errors import ModelFileError
from pegainfer.models.llama.config import LINE, LlamaConfig
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.weights import (
    Entry,
    WeightTable,
    embedding_in_gguf,
    in_layer,
    raw_f32,
    read_vector,
    read_weights,
)
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.tensorfile import TensorFile

Array = np.ndarray[Any, Any]

TABLE = WeightTable(
    line=LINE,
    embed=Entry("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    others=(Entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),),
    head=Entry("lm_head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size")),
    layer=(
        in_layer("attn_norm", "input_layernorm", "attn_norm", ("hidden_size",)),
        in_layer("wq", "self_attn.q_proj", "attn_q", ("q_size", "hidden_size"), heads="num_heads"),
        in_layer("wk", "self_attn.k_proj", "attn_k", ("kv_size", "hidden_size"), heads="num_kv_heads"),
        in_layer("wv", "self_attn.v_proj", "attn_v", ("kv_size", "hidden_size")),
        in_layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size")),
        in_layer("mlp_norm", "post_attention_layernorm", "ffn_norm", ("hidden_size",)),
        in_layer("w_gate", "mlp.gate_proj", "ffn_gate", ("intermediate_size", "hidden_size")),
        in_layer("w_up", "mlp.up_proj", "ffn_up", ("intermediate_size", "hidden_size")),
        in_layer("w_down", "mlp.down_proj", "ffn_down", ("hidden_size", "intermediate_size")),
    ),
)
ROPE_FREQS = "rope_freqs.weight"  # GGUF: divisors of the frequencies, [D/2]; how it stores llama3 scaling


@dataclass(frozen=True)
class LlamaWeights:
    """A model's weights as its file holds them.

    Args:
        config: with the vocabulary and tying that the file shows.
        tensors: RawWeight by the forward's name; matrices are views of the mapped file, norms are f32.
        rope_divisors: [D/2] float32 or None; each frequency is divided by its own.
    """

    config: LlamaConfig
    tensors: Mapping[str, RawWeight]
    rope_divisors: Array | None = None

    @property
    def formats(self) -> dict[str, str]:
        return {name: w.format for name, w in self.tensors.items()}

    def cos_sin(self, num_positions: int) -> RawWeight:
        """The rotation's table: [num_positions, D] f32."""
        c = self.config
        freqs = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        if self.rope_divisors is not None:
            freqs = freqs / self.rope_divisors
        return raw_f32(cos_sin_table(num_positions, freqs))


def load_gguf(file: GGUFFile) -> LlamaWeights:
    """Reads config and weights of an open GGUF file. Raises ConfigError, ModelFileError, UnsupportedError."""
    rows, tied = embedding_in_gguf(TABLE, file)
    config = LlamaConfig.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    tensors = read_weights(TABLE, config, file, "gguf", ignored={ROPE_FREQS}, row_order=head_row_order)
    divisors = None
    if ROPE_FREQS in file.tensors:
        divisors = read_vector(file, ROPE_FREQS, (config.half_head_dim,))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ModelFileError(f"tensor {ROPE_FREQS}: divisors must be above 0", where=file.path)
    return LlamaWeights(config, tensors, divisors)


def load_safetensors(config: LlamaConfig, file: TensorFile) -> LlamaWeights:
    """Maps the tensors of a checkpoint in Hugging Face's naming. Raises ModelFileError, UnsupportedError."""
    # Old Llama 2 files carry the rotation's frequencies, which follow from the config.
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return LlamaWeights(config, read_weights(TABLE, config, file, "hf", ignored=ignored))


def head_row_order(rows: int, heads: int) -> Array:
    """Where row i of q or k lies in a GGUF file, [rows] int64.

    llama.cpp's converter interleaves the halves of each head (row 2j is j, row 2j + 1 is D/2 + j) for its
    rotation of neighbouring pairs; ours rotates halves, as Hugging Face does.
    """
    stored = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)
    order = np.empty(rows, np.int64)
    order[stored] = np.arange(rows)
    return order
