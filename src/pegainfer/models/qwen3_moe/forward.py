"""The forward pass of Qwen3-MoE (arXiv:2505.09388; transformers `modeling_qwen3_moe.py`), written once; every
backend executes what it records. Its attention is that of dense Qwen3. Most layers have experts in place of
one feed-forward block; each token goes to the K best of a softmax over all N.

Axes: T tokens of the step, R rows (sequences), L rows of the residual stream whose logits are wanted, M the
residual stream's width, H query heads, G KV heads, D head size, F feed-forward width of dense layers, K
experts of a token, V vocabulary, N KV blocks, Y layers, S tokens a block, W blocks a sequence, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pegainfer.kv.device.layout import PageLayout
from pegainfer.models.qwen3_moe.config import Qwen3MoeConfig
from pegainfer.models.qwen3_moe.weights import TABLE
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD, QKV_NORM_ROPE_APPEND
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe_shard import emit_experts
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.sampler import head_of
from pegainfer.runner.program import INPUTS, Formats, Sizes, kv_pages, shape

# name -> shape; activations in Formats.activation.
BUFFERS: dict[str, tuple[str, ...]] = {
    "q": ("T", "H", "D"),
    "attn": ("T", "H", "D"),
    "act": ("T", "F"),  # of dense layers
}


def groups(config: Qwen3MoeConfig, block_size: int, formats: Formats) -> tuple[PageLayout, ...]:
    """Pages of keys and values."""
    c = config
    return (kv_pages(c.num_layers, c.num_kv_heads, c.head_dim, block_size, formats),)


def forward(
    config: Qwen3MoeConfig, weights: Mapping[str, str], sizes: Sizes, formats: Formats | None = None
) -> Program:
    """Token ids to logits: x [T, M] and logits [L, V] are its outputs, `kv` the state it appends to.

    Args:
        weights: storage format of each weight by its name in models/qwen3_moe/weights.py.
        formats: of what is computed; float32 throughout if None.
    """
    c, f = config, formats or Formats()
    b = Builder("qwen3_moe")
    w = {name: b.weight(name, *dims, dtype=weights[name]) for name, dims in TABLE.shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.head_dim, dtype="f32")
    pages = sizes.pages(b, "kv")
    kv, slots = pages.parts["kv"], pages.places
    axes = {"H": c.num_heads, "D": c.head_dim, "F": c.intermediate_size}
    token_ids, positions, query_starts, query_lens, context_lens, logit_rows = (
        b.input(name, *letters) for name, letters in INPUTS.items()
    )
    q, attn, act = (b.buffer(n, *shape(letters, axes), dtype=f.activation) for n, letters in BUFFERS.items())
    x = b.output("x", "T", c.hidden_size, dtype=f.residual)  # so that `prompt_logprobs` can read it
    partial = b.buffer("partial", "T", c.hidden_size)  # float32, in which ranks add up
    experts = b.buffer("experts", "T", c.experts_per_token, dtype="i32")
    logits = b.output("logits", "L", c.vocab_size)
    eps, scale = c.norm_eps, c.head_dim**-0.5

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=token_ids)
    for layer in range(c.num_layers):
        here = [e.name for e in TABLE.layer if e.when is None or e.when(c, layer)]
        v = {name.removeprefix("layers.{}."): w[name.format(layer)] for name in here}
        b.emit(
            QKV_NORM_ROPE_APPEND, {"eps": eps, "layer": layer},
            q=q, kv=kv, x=x, norm=v["attn_norm"], wq=v["wq"], wk=v["wk"], wv=v["wv"],
            positions=positions, slots=slots, cos_sin=cos_sin, q_norm=v["q_norm"], k_norm=v["k_norm"],
        )  # fmt: skip
        b.emit(
            ATTENTION, {"layer": layer, "scale": scale},
            out=attn, q=q, kv=kv, query_starts=query_starts, query_lens=query_lens,
            context_lens=context_lens, block_table=pages.block_table,
        )  # fmt: skip
        b.emit(LINEAR, out=partial, a=attn.view("T", c.q_size), w=v["wo"])
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        if c.is_dense(layer):
            b.emit(
                GATE_UP_SWIGLU, {"eps": eps},
                out=act, x=x, norm=v["mlp_norm"], w_gate=v["w_gate"], w_up=v["w_up"],
            )  # fmt: skip
            b.emit(LINEAR, out=partial, a=act, w=v["w_down"])
        else:
            emit_experts(
                b, {"eps": eps, **routing(c)}, c.first_expert,
                out=partial, experts=experts, x=x, norm=v["mlp_norm"], w_router=v["w_router"],
                w_gate=v["w_gate"], w_up=v["w_up"], w_down=v["w_down"],
            )  # fmt: skip
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(
        LM_HEAD, {"eps": eps},
        logits=logits, x=x, rows=logit_rows, norm=w["norm"], w=w[TABLE.head_name(c)],
    )  # fmt: skip
    return b.build()


def routing(config: Qwen3MoeConfig) -> dict[str, Any]:
    """How tokens go to experts: a softmax over all of them, without groups."""
    return {
        "sigmoid": False, "renormalize": config.norm_topk_prob, "scale": 1.0, "groups": 1, "kept_groups": 1
    }  # fmt: skip


head = partial(head_of, TABLE)  # the last call, for programs that apply it to other rows
