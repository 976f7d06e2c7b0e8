"""Qwen3.5's weights: one table of names and shapes, and what is done to them as they are read.

- The factor of all norms but linear attention's own is 1 + w: the 1 is added here, in float32.
- q_proj holds the queries and the output gate of each head in turn; they become two matrices.
- Only the first `rotary_dim` channels of a head are rotated, i with i + rotary_dim / 2. The channels of q
  and k are put into another order, in which these pairs lie half a head apart, and the rotation's table has
  angle 0 for all other pairs: so kernels rotate whole heads. Scores are the same, as q and k share the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pegainfer.models.qwen3_5.config import FULL, LINE, LINEAR, Qwen3_5Config
from pegainfer.ops.rope import attention_factor, cos_sin_table, inverse_frequencies
from pegainfer.ops.weights import Entry, InFile, WeightTable, plan_weights
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight, float32

Array = np.ndarray[Any, Any]

PREFIXES = ("model.language_model.", "model.")  # of published files; of saves without the vision tower
IGNORED = ("model.visual.*", "visual.*", "mtp.*")  # images are not served, nor is the draft head


def _channel_order(c: Qwen3_5Config) -> list[range]:
    """The channels of a head in the order in which kernels rotate them."""
    half, kept = c.rotary_dim // 2, (c.head_dim - c.rotary_dim) // 2
    first, second = range(half), range(half, 2 * half)
    rest = range(2 * half, 2 * half + kept), range(2 * half + kept, c.head_dim)
    return [r for r in (first, rest[0], second, rest[1]) if r]


def _moved(ranges: list[range], by: int) -> list[range]:
    return [range(r.start + by, r.stop + by) for r in ranges]


def _query_rows(c: Qwen3_5Config) -> list[range]:
    order = _channel_order(c)
    return [r for h in range(c.num_heads) for r in _moved(order, 2 * h * c.head_dim)]


def _gate_rows(c: Qwen3_5Config) -> list[range]:
    return [range((2 * h + 1) * c.head_dim, 2 * (h + 1) * c.head_dim) for h in range(c.num_heads)]


def _key_rows(c: Qwen3_5Config) -> list[range]:
    order = _channel_order(c)
    return [r for g in range(c.num_kv_heads) for r in _moved(order, g * c.head_dim)]


def _add_one(c: Qwen3_5Config, w: Array) -> Array:
    factor: Array = np.float32(1) + w
    return factor


def _head_factor(c: Qwen3_5Config, w: Array) -> Array:
    factor: Array = _add_one(c, w)[[channel for r in _channel_order(c) for channel in r]]
    return factor


def _transposed(c: Qwen3_5Config, w: Array) -> Array:
    return w.T


def _in_layers(kind: str, name: str, stored: Callable[[str], InFile], *shape: str) -> Entry:
    """A weight of the layers of one kind; `kind` '' for all layers."""
    when = None if not kind else (lambda c, i: c.layer_types[i] == kind)
    return Entry(f"layers.{{}}.{name}", shape, stored("layers.{}."), InFile(""), when=when)


def _table(prefix: str) -> WeightTable:
    def outside(name: str, hf: InFile, *shape: str) -> Entry:
        return Entry(name, shape, hf, InFile(""))

    def at(name: str, **options: Any) -> Callable[[str], InFile]:
        return lambda layer: InFile(f"{prefix}{layer}{name}", **options)

    every, full, linear = (partial(_in_layers, kind) for kind in ("", FULL, LINEAR))
    q = {"shape": ("gated_q_size", "hidden_size")}
    return WeightTable(
        line=LINE,
        embed=outside("embed", InFile(f"{prefix}embed_tokens.weight"), "vocab_size", "hidden_size"),
        others=(outside("norm", InFile(f"{prefix}norm.weight", convert=_add_one), "hidden_size"),),
        head=outside("lm_head", InFile("lm_head.weight"), "vocab_size", "hidden_size"),
        layer=(
            every("mix_norm", at("input_layernorm.weight", convert=_add_one), "hidden_size"),
            full("wq", at("self_attn.q_proj.weight", rows=_query_rows, **q), "q_size", "hidden_size"),
            full("wg", at("self_attn.q_proj.weight", rows=_gate_rows, **q), "q_size", "hidden_size"),
            full("wk", at("self_attn.k_proj.weight", rows=_key_rows), "kv_size", "hidden_size"),
            full("wv", at("self_attn.v_proj.weight"), "kv_size", "hidden_size"),
            full("q_norm", at("self_attn.q_norm.weight", convert=_head_factor), "head_dim"),
            full("k_norm", at("self_attn.k_norm.weight", convert=_head_factor), "head_dim"),
            full("wo", at("self_attn.o_proj.weight"), "hidden_size", "q_size"),
            linear("w_qkv", at("linear_attn.in_proj_qkv.weight"), "conv_size", "hidden_size"),
            linear("w_z", at("linear_attn.in_proj_z.weight"), "delta_size", "hidden_size"),
            linear("w_a", at("linear_attn.in_proj_a.weight"), "delta_heads", "hidden_size"),
            linear("w_b", at("linear_attn.in_proj_b.weight"), "delta_heads", "hidden_size"),
            linear(
                "taps",
                at("linear_attn.conv1d.weight", shape=("conv_size", "conv_width"), convert=_transposed),
                "conv_width",
                "conv_size",
            ),
            linear("a_log", at("linear_attn.A_log"), "delta_heads"),
            linear("dt_bias", at("linear_attn.dt_bias"), "delta_heads"),
            linear("out_norm", at("linear_attn.norm.weight"), "delta_dim"),
            linear("w_out", at("linear_attn.out_proj.weight"), "hidden_size", "delta_size"),
            every("mlp_norm", at("post_attention_layernorm.weight", convert=_add_one), "hidden_size"),
            every("w_gate", at("mlp.gate_proj.weight"), "intermediate_size", "hidden_size"),
            every("w_up", at("mlp.up_proj.weight"), "intermediate_size", "hidden_size"),
            every("w_down", at("mlp.down_proj.weight"), "hidden_size", "intermediate_size"),
        ),
    )


TABLES = {prefix: _table(prefix) for prefix in PREFIXES}
TABLE = TABLES[PREFIXES[0]]  # for names and shapes, which do not depend on the prefix


@dataclass(frozen=True)
class Qwen3_5Weights:
    """Where a model's weights lie in its file.

    Args:
        tensors: by the forward's name; valid while the file is open.
    """

    config: Qwen3_5Config
    tensors: Mapping[str, Weight]

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table with yarn's attention factor in it: [num_positions, D] f32.

        The pairs that are not rotated have cosine 1 and sine 0.
        """
        c = self.config
        freqs = inverse_frequencies(c.rotary_dim, c.rope_theta, c.rope_scaling)
        rotated = cos_sin_table(num_positions, freqs, attention_factor(c.rope_scaling))
        half, pairs = c.rotary_dim // 2, c.head_dim // 2
        table = np.zeros((num_positions, c.head_dim), np.float32)
        table[:, :half], table[:, half:pairs] = rotated[:, :half], 1
        table[:, pairs : pairs + half] = rotated[:, half:]
        return float32(table)


def load_safetensors(config: Qwen3_5Config, file: TensorFile) -> Qwen3_5Weights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises ModelFileError, UnsupportedError."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in file.tensors), PREFIXES[0])
    return Qwen3_5Weights(config, plan_weights(TABLES[prefix], config, file, "hf", ignored=IGNORED))
