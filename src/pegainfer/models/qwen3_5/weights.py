"""Qwen3.5's weights: one table of names and shapes, and what is done to them as they are read.

- The factor of all norms but linear attention's own is 1 + w: the 1 is added here, in float32.
- q_proj holds the queries and the output gate of each head in turn; they become two matrices.
- Only the first `rotary_dim` channels of a head are rotated, i with i + rotary_dim / 2. The channels of q
  and k are put into another order, in which these pairs lie half a head apart, and the rotation's table has
  angle 0 for all other pairs: so kernels rotate whole heads. Scores are the same, as q and k share the order.
- GGUF files have the value heads of linear attention in another order, which is kept: see `tiled_heads`.
- A layer's experts are stored as stacks, gate and up projections in one tensor or in two, or one by one.

Long because each of these steps stands beside the table that names its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from pegainfer.models.qwen3_5.config import FULL, LINE, LINEAR, Qwen3_5Config, of_rank
from pegainfer.ops.quantization import plan_checkpoint
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.rope import attention_factor, inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.ops.weights import Entry, InFile, Rows, WeightTable, embedding_in_gguf, plan_weights
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]
Stored = Mapping[str, Any]  # fields of InFile beside the name
NO_CHANGE: Stored = {}
When = Callable[[Qwen3_5Config, int], bool]  # of a config and a layer's number: whether it has a weight

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


def _gguf_head_factor(c: Qwen3_5Config, w: Array) -> Array:
    factor: Array = w[[channel for r in _channel_order(c) for channel in r]]
    return factor


def _decay_log(c: Qwen3_5Config, w: Array) -> Array:
    """GGUF has -exp(A_log)."""
    found: Array = np.log(-w)
    return found


def _gate_part(c: Qwen3_5Config) -> list[range]:
    return [range(c.expert_size)]


def _up_part(c: Qwen3_5Config) -> list[range]:
    return [range(c.expert_size, 2 * c.expert_size)]


# Sections of axes of linear attention, of each of which a rank has its share. Value heads whose order is
# `tiled_heads` go with the key heads of the same rank if each row of them is divided.


def _value_heads(c: Qwen3_5Config) -> list[int]:
    return [c.delta_key_heads] * (c.delta_heads // c.delta_key_heads) if c.tiled_heads else [c.delta_heads]


def _value_channels(c: Qwen3_5Config) -> list[int]:
    return [heads * c.delta_dim for heads in _value_heads(c)]


def _conv_channels(c: Qwen3_5Config) -> list[int]:
    """Queries, keys and values."""
    return [c.delta_key_heads * c.delta_key_dim] * 2 + _value_channels(c)


def _of(kind: str) -> When:
    return lambda c, layer: c.layer_types[layer] == kind


def _is_dense(c: Qwen3_5Config, layer: int) -> bool:
    return not c.num_experts


def _has_experts(c: Qwen3_5Config, layer: int) -> bool:
    return c.num_experts > 0


class _Names(msgspec.Struct, frozen=True):
    """Makes entries. `prefix`: what the names of a checkpoint's tensors begin with, but for the head's."""

    prefix: str

    def weight(
        self, name: str, hf: str, gguf: str, *shape: str,
        in_hf: Stored = NO_CHANGE, in_gguf: Stored = NO_CHANGE, **divided: Any,
    ) -> Entry:  # fmt: skip
        """`in_hf`, `in_gguf`: fields of InFile. `divided`: other fields of Entry."""
        return Entry(name, shape, InFile(hf, **in_hf), InFile(gguf, **in_gguf), **divided)

    def layer(self, name: str, hf: str, gguf: str, *shape: str, **options: Any) -> Entry:
        names = f"layers.{{}}.{name}", f"{self.prefix}layers.{{}}.{hf}", f"blk.{{}}.{gguf}"
        return self.weight(*names, *shape, **options)

    def full(self, name: str, hf: str, gguf: str, *shape: str, **options: Any) -> Entry:
        names = name, f"self_attn.{hf}.weight", f"{gguf}.weight"
        return self.layer(*names, *shape, when=_of(FULL), **options)

    def linear(self, name: str, hf: str, gguf: str, *shape: str, **options: Any) -> Entry:
        return self.layer(name, f"linear_attn.{hf}", gguf, *shape, when=_of(LINEAR), **options)

    def dense(self, name: str, hf: str, gguf: str, *shape: str, shard: int) -> Entry:
        names = name, f"mlp.{hf}.weight", f"{gguf}.weight"
        return self.layer(*names, *shape, when=_is_dense, shard=shard)

    def moe(self, name: str, hf: str, gguf: str, *shape: str, shard: int | None = None) -> Entry:
        """A router, or a matrix of the shared expert, which is a stack of one."""
        names = name, f"mlp.{hf}.weight", f"{gguf}.weight"
        return self.layer(*names, *shape, when=_has_experts, shard=shard)

    def experts(self, name: str, kind: str, *shape: str, shard: int, part: Rows | None = None) -> Entry:
        """A stack of one matrix of each expert.

        Args:
            kind: 'gate', 'up' or 'down'.
            part: the rows of each matrix of the tensor that has gate and up in one; None: it is by itself.
        """
        at, stack = f"{self.prefix}layers.{{}}.mlp.experts.", "blk.{}.ffn_"
        each = InFile(f"{at}{{expert}}.{kind}_proj.weight")
        alone = InFile(f"{stack}{kind}_exps.weight")
        if part is None:
            hf, gguf = InFile(f"{at}{kind}_proj", otherwise=each), alone
        else:
            both = ("num_experts", "gate_up_size", "hidden_size")
            hf = InFile(f"{at}gate_up_proj", both, part, otherwise=each)
            gguf = replace(alone, otherwise=InFile(f"{stack}gate_up_exps.weight", both, part))
        names = f"layers.{{}}.{name}", ("local_experts", *shape), hf, gguf
        return Entry(*names, shard, _has_experts, experts=True)


def _both(**options: Any) -> dict[str, Stored]:
    return {"in_hf": options, "in_gguf": options}


def _table(prefix: str) -> WeightTable:
    names = _Names(prefix)
    layer, full, linear = names.layer, names.full, names.linear
    one: Stored = {"convert": _add_one}  # GGUF's norms have the 1 already
    table, hidden = ("vocab_size", "hidden_size"), ("hidden_size",)
    gated = ("gated_q_size", "hidden_size")
    of_kv_heads: Any = {"shard": 0, "most_shards": "num_kv_heads"}
    of_heads: Any = {"shard": 0, "sections": _value_heads}  # value heads of linear attention
    head_norm = {"in_hf": {"convert": _head_factor}, "in_gguf": {"convert": _gguf_head_factor}}
    return WeightTable(
        line=LINE,
        embed=names.weight("embed", f"{prefix}embed_tokens.weight", "token_embd.weight", *table),
        others=(names.weight("norm", f"{prefix}norm.weight", "output_norm.weight", *hidden, in_hf=one),),
        head=names.weight("lm_head", "lm_head.weight", "output.weight", *table),
        layer=(
            layer("mix_norm", "input_layernorm.weight", "attn_norm.weight", *hidden, in_hf=one),
            full(
                "wq", "q_proj", "attn_q", "q_size", "hidden_size", shard=0,
                **_both(shape=gated, rows=_query_rows),
            ),
            full(
                "wg", "q_proj", "attn_q", "q_size", "hidden_size", shard=0,
                **_both(shape=gated, rows=_gate_rows),
            ),
            full(
                "wk", "k_proj", "attn_k", "kv_size", "hidden_size", **of_kv_heads, **_both(rows=_key_rows)
            ),
            full("wv", "v_proj", "attn_v", "kv_size", "hidden_size", **of_kv_heads),
            full("q_norm", "q_norm", "attn_q_norm", "head_dim", **head_norm),
            full("k_norm", "k_norm", "attn_k_norm", "head_dim", **head_norm),
            full("wo", "o_proj", "attn_output", "hidden_size", "q_size", shard=1),
            linear(
                "w_qkv", "in_proj_qkv.weight", "attn_qkv.weight", "conv_size", "hidden_size", shard=0,
                sections=_conv_channels,
            ),
            linear(
                "w_z", "in_proj_z.weight", "attn_gate.weight", "delta_size", "hidden_size", shard=0,
                sections=_value_channels,
            ),
            linear("w_a", "in_proj_a.weight", "ssm_alpha.weight", "delta_heads", "hidden_size", **of_heads),
            linear("w_b", "in_proj_b.weight", "ssm_beta.weight", "delta_heads", "hidden_size", **of_heads),
            linear(
                "taps", "conv1d.weight", "ssm_conv1d.weight", "conv_width", "conv_size", shard=1,
                sections=_conv_channels, **_both(shape=("conv_size", "conv_width"), convert=_transposed),
            ),
            linear("a_log", "A_log", "ssm_a", "delta_heads", in_gguf={"convert": _decay_log}, **of_heads),
            linear("dt_bias", "dt_bias", "ssm_dt.bias", "delta_heads", **of_heads),
            linear("out_norm", "norm.weight", "ssm_norm.weight", "delta_dim"),
            linear(
                "w_out", "out_proj.weight", "ssm_out.weight", "hidden_size", "delta_size", shard=1,
                sections=_value_channels,
            ),
            layer(
                "mlp_norm", "post_attention_layernorm.weight", "post_attention_norm.weight", *hidden,
                in_hf=one,
            ),
            *_feed_forward(names),
        ),
    )  # fmt: skip


def _feed_forward(names: _Names) -> tuple[Entry, ...]:
    dense, moe, experts = names.dense, names.moe, names.experts
    wide, narrow = ("intermediate_size", "hidden_size"), ("hidden_size", "intermediate_size")
    shared = ("num_shared_experts", "shared_expert_size", "hidden_size")
    shared_down = ("num_shared_experts", "hidden_size", "shared_expert_size")
    router, one_router = ("num_experts", "hidden_size"), ("num_shared_experts", "hidden_size")
    return (
        dense("w_gate", "gate_proj", "ffn_gate", *wide, shard=0),
        dense("w_up", "up_proj", "ffn_up", *wide, shard=0),
        dense("w_down", "down_proj", "ffn_down", *narrow, shard=1),
        moe("w_router", "gate", "ffn_gate_inp", *router),
        experts("w_gate", "gate", "expert_size", "hidden_size", part=_gate_part, shard=1),
        experts("w_up", "up", "expert_size", "hidden_size", part=_up_part, shard=1),
        experts("w_down", "down", "hidden_size", "expert_size", shard=2),
        moe("shared_router", "shared_expert_gate", "ffn_gate_inp_shexp", *one_router),
        moe("shared_gate", "shared_expert.gate_proj", "ffn_gate_shexp", *shared, shard=1),
        moe("shared_up", "shared_expert.up_proj", "ffn_up_shexp", *shared, shard=1),
        moe("shared_down", "shared_expert.down_proj", "ffn_down_shexp", *shared_down, shard=2),
    )


TABLES = {prefix: _table(prefix) for prefix in PREFIXES}
TABLE = TABLES[PREFIXES[0]]  # for names and shapes, which do not depend on the prefix


class Qwen3_5Weights(msgspec.Struct, frozen=True):
    """Where a model's weights lie in its file.

    Args:
        config: with the sizes that one rank has.
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
        return rotation_table(num_positions, freqs, attention_factor(c.rope_scaling), c.head_dim)


def load_gguf(file: GGUFFile, at: TensorRank = ONE_RANK) -> Qwen3_5Weights:
    """Reads config and weights of an open GGUF file.

    Raises ConfigError, ModelFileError, UnsupportedError, and OpError where a weight does not divide.
    """
    rows, tied = embedding_in_gguf(TABLE, file)
    config = Qwen3_5Config.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    ignored = [f"blk.{config.num_layers + i}.*" for i in range(config.draft_layers)]
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return Qwen3_5Weights(own, plan_weights(TABLE, config, file, "gguf", ignored=ignored, at=at))


def load_safetensors(config: Qwen3_5Config, file: TensorFile, at: TensorRank = ONE_RANK) -> Qwen3_5Weights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises as `load_gguf`."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in file.tensors), PREFIXES[0])
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return Qwen3_5Weights(
        own, plan_checkpoint(TABLES[prefix], config, file, config.quantization, ignored=IGNORED, at=at)
    )
