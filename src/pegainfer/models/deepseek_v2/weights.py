"""Weights of the DeepSeek-V2 family: one table of names and shapes, and how they are arranged when read.

- Files rotate adjacent channels (2j, 2j + 1). The rows of queries and of the cached key that are rotated are
  put into another order, even ones first, so that kernels rotate halves; both share the order, and scores
  are the same.
- kv_b_proj makes each head's keys and values of a latent. Its rows become two stacks with a matrix of each
  head: `w_v` [H, A, K] as they lie, and `w_k` [H, K, X] transposed, which queries are multiplied by. GGUF
  files have kv_b_proj as it is (attn_kv_b) or these two (attn_k_b, attn_v_b).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from pegainfer.models.deepseek_v2.config import LINE, SIGMOID, DeepseekV2Config, of_rank
from pegainfer.ops.quantization import plan_checkpoint
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.rope import attention_factor, inverse_frequencies
from pegainfer.ops.rotation_table import rotation_table
from pegainfer.ops.weights import Entry, InFile, WeightTable, embedding_in_gguf, plan_weights
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]
When = Callable[[DeepseekV2Config, int], bool]
PREFIXES = ("", "language_model.")  # of text models; of Kimi-K2.5, which has a vision tower beside it
IGNORED = ("vision_tower.*", "mm_projector.*")  # images are not served
WIDE, NARROW = ("intermediate_size", "hidden_size"), ("hidden_size", "intermediate_size")


def _halves(start: int, size: int) -> list[range]:
    """Rows start … start + size, even ones first."""
    return [range(start, start + size, 2), range(start + 1, start + size, 2)]


def _query_rows(c: DeepseekV2Config) -> list[range]:
    heads = range(0, c.q_size, c.head_dim)
    return [r for h in heads for r in (range(h, h + c.plain_dim), *_halves(h + c.plain_dim, c.rotary_dim))]


def _latent_rows(c: DeepseekV2Config) -> list[range]:
    return [range(c.latent_rank), *_halves(c.latent_rank, c.rotary_dim)]


def _key_rows(c: DeepseekV2Config) -> list[range]:
    each = c.plain_dim + c.value_dim
    return [range(h * each, h * each + c.plain_dim) for h in range(c.num_heads)]


def _value_rows(c: DeepseekV2Config) -> list[range]:
    each = c.plain_dim + c.value_dim
    return [range(h * each + c.plain_dim, (h + 1) * each) for h in range(c.num_heads)]


def _keys(c: DeepseekV2Config, rows: Array) -> Array:
    """[H · X, K] to [H, K, X]."""
    return rows.reshape(c.num_heads, c.plain_dim, c.latent_rank).swapaxes(1, 2)


def _is_dense(c: DeepseekV2Config, layer: int) -> bool:
    return c.is_dense(layer)


def _has_experts(c: DeepseekV2Config, layer: int) -> bool:
    return not c.is_dense(layer)


def _has_shared(c: DeepseekV2Config, layer: int) -> bool:
    return _has_experts(c, layer) and c.num_shared_experts > 0


def _has_bias(c: DeepseekV2Config, layer: int) -> bool:
    return _has_experts(c, layer) and c.scoring == SIGMOID


def _is_narrow(c: DeepseekV2Config, layer: int) -> bool:
    return c.query_rank > 0


def _is_direct(c: DeepseekV2Config, layer: int) -> bool:
    return c.query_rank == 0


def _table(prefix: str, *, split: bool) -> WeightTable:
    """Long because it is the whole list of a model's weights, in forward order.

    Args:
        prefix: what the names of a checkpoint's tensors begin with.
        split: whether a GGUF file has attn_k_b and attn_v_b in place of attn_kv_b.
    """
    model = f"{prefix}model."

    def outer(name: str, hf: str, gguf: str, *shape: str) -> Entry:
        return Entry(name, shape, InFile(f"{prefix}{hf}.weight"), InFile(f"{gguf}.weight"))

    def layer(
        name: str, hf: str, gguf: str, *shape: str, when: When | None = None, shard: int | None = None,
        **stored: Any,
    ) -> Entry:  # fmt: skip
        """`stored`: fields of InFile."""
        files = InFile(f"{model}layers.{{}}.{hf}", **stored), InFile(f"blk.{{}}.{gguf}", **stored)
        return Entry(f"layers.{{}}.{name}", shape, *files, shard, when)

    def experts(name: str, hf: str, gguf: str, *shape: str, shard: int) -> Entry:
        each = InFile(f"{model}layers.{{}}.mlp.experts.{{expert}}.{hf}.weight")
        stack = InFile(f"blk.{{}}.{gguf}.weight")
        names = f"layers.{{}}.{name}", ("local_experts", *shape), each, stack
        return Entry(*names, shard, _has_experts, experts=True)

    def of_heads(name: str, part: str, *shape: str, **stored: Any) -> Entry:
        both = {"shape": ("keys_values_size", "latent_rank"), **stored}
        hf = InFile(f"{model}layers.{{}}.self_attn.kv_b_proj.weight", **both)
        gguf = InFile(f"blk.{{}}.{part}.weight") if split else InFile("blk.{}.attn_kv_b.weight", **both)
        return Entry(f"layers.{{}}.{name}", ("num_heads", *shape), hf, gguf, shard=0)

    q_shape = ("q_size", "query_inputs")
    return WeightTable(
        line=LINE,
        embed=outer("embed", "model.embed_tokens", "token_embd", "vocab_size", "hidden_size"),
        others=(outer("norm", "model.norm", "output_norm", "hidden_size"),),
        head=outer("lm_head", "lm_head", "output", "vocab_size", "hidden_size"),
        layer=(
            layer("attn_norm", "input_layernorm.weight", "attn_norm.weight", "hidden_size"),
            layer(
                "wq", "self_attn.q_proj.weight", "attn_q.weight", *q_shape, rows=_query_rows, shard=0,
                when=_is_direct,
            ),
            layer(
                "wq_down", "self_attn.q_a_proj.weight", "attn_q_a.weight", "query_rank", "hidden_size",
                when=_is_narrow,
            ),
            layer(
                "q_norm", "self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", "query_rank",
                when=_is_narrow,
            ),
            layer(
                "wq", "self_attn.q_b_proj.weight", "attn_q_b.weight", *q_shape, rows=_query_rows, shard=0,
                when=_is_narrow,
            ),
            layer(
                "w_latent", "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", "cached_size",
                "hidden_size", rows=_latent_rows,
            ),
            layer(
                "latent_norm", "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", "latent_rank"
            ),
            of_heads("w_k", "attn_k_b", "latent_rank", "plain_dim", rows=_key_rows, moves=_keys),
            of_heads("w_v", "attn_v_b", "value_dim", "latent_rank", rows=_value_rows, stacked=True),
            layer(
                "wo", "self_attn.o_proj.weight", "attn_output.weight", "hidden_size", "values_size", shard=1
            ),
            layer("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "hidden_size"),
            layer(
                "w_router", "mlp.gate.weight", "ffn_gate_inp.weight", "num_experts", "hidden_size",
                when=_has_experts,
            ),
            layer(
                "router_bias", "mlp.gate.e_score_correction_bias", "exp_probs_b.bias", "num_experts",
                when=_has_bias,
            ),
            experts("w_gate", "gate_proj", "ffn_gate_exps", "expert_size", "hidden_size", shard=1),
            experts("w_up", "up_proj", "ffn_up_exps", "expert_size", "hidden_size", shard=1),
            experts("w_down", "down_proj", "ffn_down_exps", "hidden_size", "expert_size", shard=2),
            layer(
                "shared_gate", "mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight",
                "shared_size", "hidden_size", shard=0, when=_has_shared,
            ),
            layer(
                "shared_up", "mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight",
                "shared_size", "hidden_size", shard=0, when=_has_shared,
            ),
            layer(
                "shared_down", "mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight",
                "hidden_size", "shared_size", shard=1, when=_has_shared,
            ),
            layer("w_gate", "mlp.gate_proj.weight", "ffn_gate.weight", *WIDE, shard=0, when=_is_dense),
            layer("w_up", "mlp.up_proj.weight", "ffn_up.weight", *WIDE, shard=0, when=_is_dense),
            layer("w_down", "mlp.down_proj.weight", "ffn_down.weight", *NARROW, shard=1, when=_is_dense),
        ),
    )  # fmt: skip


TABLES = {prefix: _table(prefix, split=False) for prefix in PREFIXES}
TABLE = TABLES[PREFIXES[0]]  # for names and shapes, which do not depend on how files store them
SPLIT_TABLE = _table(PREFIXES[0], split=True)


class DeepseekV2Weights(msgspec.Struct, frozen=True):
    """Where a model's weights lie in its file.

    Args:
        config: with the sizes that one rank has.
        tensors: by the forward's name; valid while the file is open.
    """

    config: DeepseekV2Config
    tensors: Mapping[str, Weight]

    def cos_sin(self, num_positions: int) -> Weight:
        """The rotation's table with yarn's attention factor in it: [num_positions, B] f32."""
        c = self.config
        freqs = inverse_frequencies(c.rotary_dim, c.rope_theta, c.rope_scaling)
        return rotation_table(num_positions, freqs, attention_factor(c.rope_scaling))


def load_gguf(file: GGUFFile, at: TensorRank = ONE_RANK) -> DeepseekV2Weights:
    """Reads config and weights of an open GGUF file.

    Raises ConfigError, ModelFileError, UnsupportedError, and OpError where a weight does not divide.
    """
    rows, tied = embedding_in_gguf(TABLE, file)
    config = DeepseekV2Config.from_gguf(file.metadata, str(file.path), vocab_size=rows, tied=tied)
    table = SPLIT_TABLE if "blk.0.attn_k_b.weight" in file.tensors else TABLE
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return DeepseekV2Weights(own, plan_weights(table, config, file, "gguf", at=at))


def load_safetensors(
    config: DeepseekV2Config, file: TensorFile, at: TensorRank = ONE_RANK
) -> DeepseekV2Weights:
    """Finds the tensors of a checkpoint in Hugging Face's naming. Raises as `load_gguf`."""
    prefix = next((p for p in PREFIXES if f"{p}model.embed_tokens.weight" in file.tensors), PREFIXES[0])
    drafts = [f"{prefix}model.layers.{config.num_layers + i}.*" for i in range(config.draft_layers)]
    ignored = (*IGNORED, *drafts)
    own = of_rank(config, at)  # refuses ranks that do not fit, before weights are divided
    return DeepseekV2Weights(
        own, plan_checkpoint(TABLES[prefix], config, file, config.quantization, ignored=ignored, at=at)
    )
