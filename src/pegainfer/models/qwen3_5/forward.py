"""The forward pass of Qwen3.5 (transformers `modeling_qwen3_5.py`, `modeling_qwen3_5_moe.py`), and its KV
groups.

Layers of linear attention (gated delta rule, arXiv:2412.06464) and of full attention with an output gate
alternate. Each is followed by a gated feed-forward network, or in MoE models by experts: the K best of a
softmax over all, whose weights are made to sum to 1, and a shared one, weighted by a sigmoid of its own. The
shared expert is a mixture of one, so that it is the same op.

Axes: T tokens of the step, R rows (sequences), L rows of the residual stream whose logits are wanted, M the
residual stream's width; full attention has H query heads (A channels) and G KV heads of D channels; linear
attention has B value heads of E channels; F feed-forward width of dense models, K experts of a token, V
vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pegainfer.kv.device.layout import GroupLayout, Part, StateLayout
from pegainfer.models.qwen3_5.config import FULL, Qwen3_5Config
from pegainfer.models.qwen3_5.weights import TABLE
from pegainfer.ops.activation import SIGMOID_GATE
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATE_UP_SWIGLU, GATED_QKV_NORM_ROPE_APPEND, LM_HEAD
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import MOE
from pegainfer.ops.moe_shard import emit_experts
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.sampler import head_of
from pegainfer.runner.program import INPUTS, Formats, Sizes, kv_pages, shape

# Tokens between two states that are kept for prefix reuse. A state of 4B takes as much memory as the keys and
# values of 1,572 tokens, one of 35B-A3B as those of 3,144.
SNAPSHOT_EVERY, MOE_SNAPSHOT_EVERY = 256, 512
DELTA_WEIGHTS = ("w_qkv", "w_z", "w_a", "w_b", "taps", "a_log", "dt_bias", "out_norm")
ROUTING = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
SHARED_ROUTING: dict[str, Any] = {**ROUTING, "sigmoid": True, "renormalize": False}
KEY_EPS = 1e-6  # added to the squared length of q and k in linear attention

# name -> shape; activations in Formats.activation.
BUFFERS: dict[str, tuple[str, ...]] = {
    "mixed": ("T", "B", "E"),
    "q": ("T", "H", "D"),
    "attn": ("T", "H", "D"),
    "attn_gate": ("T", "A"),
    "act": ("T", "F"),
}


def groups(config: Qwen3_5Config, block_size: int, formats: Formats) -> tuple[GroupLayout, ...]:
    """Pages of the full layers' keys and values; states of the linear layers.

    A state holds the convolution's last inputs [layers, W - 1, C] and the delta rule's matrices
    [layers, B, K, E]. All layers of a state lie together, so that it is one copy.
    """
    c = config
    conv = (c.num_linear_layers, c.conv_width - 1, c.conv_size)
    delta = (c.num_linear_layers, c.delta_heads, c.delta_key_dim, c.delta_dim)
    states = (Part("conv", conv, formats.activation), Part("delta", delta, formats.state))
    return (
        kv_pages(c.num_full_layers, c.num_kv_heads, c.head_dim, block_size, formats),
        StateLayout("states", states, MOE_SNAPSHOT_EVERY if c.num_experts else SNAPSHOT_EVERY),
    )


def forward(
    config: Qwen3_5Config, weights: Mapping[str, str], sizes: Sizes, formats: Formats | None = None
) -> Program:
    """Token ids to logits: x [T, M] and logits [L, V] are its outputs; it writes `kv`, `conv` and `delta`.

    Long because it is the whole list of a step's calls, in order.

    Args:
        weights: storage format of each weight by its name in models/qwen3_5/weights.py.
        formats: of what is computed; float32 throughout if None.
    """
    c, f = config, formats or Formats()
    b = Builder("qwen3_5")
    w = {name: b.weight(name, *dims, dtype=weights[name]) for name, dims in TABLE.shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.head_dim, dtype="f32")
    pages, states = sizes.pages(b, "kv"), sizes.states(b, "states")
    step = {name: b.input(name, *letters) for name, letters in INPUTS.items()}
    rows = {name: step[name] for name in ("query_starts", "query_lens", "context_lens")}
    state_rows = {**rows, "state_ids": states.state_ids, "state_saves": states.state_saves}
    axes = {
        "M": c.hidden_size, "B": c.delta_heads, "E": c.delta_dim, "H": c.num_heads, "A": c.q_size,
        "D": c.head_dim, "F": c.intermediate_size,
    }  # fmt: skip
    mixed, q, attn, attn_gate, act = (
        b.buffer(n, *shape(letters, axes), dtype=f.activation) for n, letters in BUFFERS.items()
    )
    x = b.output("x", "T", c.hidden_size, dtype=f.residual)  # so that `prompt_logprobs` can read it
    partial = b.buffer("partial", "T", c.hidden_size)  # float32, in which ranks add up
    shared = b.buffer("shared", "T", c.hidden_size)  # likewise, of the shared expert
    experts = b.buffer("experts", "T", c.experts_per_token, dtype="i32")
    shared_experts = b.buffer("shared_experts", "T", c.num_shared_experts, dtype="i32")
    logits = b.output("logits", "L", c.vocab_size)
    eps = c.norm_eps

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=step["token_ids"])
    full = linear = 0  # layers of each kind so far: their places in pages and states
    for layer, kind in enumerate(c.layer_types):
        lw = {part: w[name] for part, name in TABLE.of_layer(c, layer).items()}
        if kind == FULL:
            b.emit(
                GATED_QKV_NORM_ROPE_APPEND, {"eps": eps, "layer": full},
                q=q, gate=attn_gate, kv=pages.parts["kv"], x=x, norm=lw["mix_norm"], wg=lw["wg"],
                wq=lw["wq"], wk=lw["wk"], wv=lw["wv"], positions=step["positions"], slots=pages.places,
                cos_sin=cos_sin, q_norm=lw["q_norm"], k_norm=lw["k_norm"],
            )  # fmt: skip
            b.emit(
                ATTENTION, {"layer": full, "scale": c.head_dim**-0.5},
                out=attn, q=q, kv=pages.parts["kv"], block_table=pages.block_table, **rows,
            )  # fmt: skip
            b.emit(SIGMOID_GATE, x=attn.view("T", c.q_size), gate=attn_gate)
            b.emit(LINEAR, out=partial, a=attn.view("T", c.q_size), w=lw["wo"])
            full += 1
        else:
            b.emit(
                GATED_DELTA,
                {"layer": linear, "eps": eps, "key_eps": KEY_EPS, "tiled": int(c.tiled_heads)},
                out=mixed, conv=states.parts["conv"], delta=states.parts["delta"], x=x, norm=lw["mix_norm"],
                **{name: lw[name] for name in DELTA_WEIGHTS}, **state_rows,
            )  # fmt: skip
            b.emit(LINEAR, out=partial, a=mixed.view("T", c.delta_size), w=lw["w_out"])
            linear += 1
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        if c.num_experts:
            emit_experts(
                b, {"eps": eps, **ROUTING}, c.first_expert,
                out=partial, experts=experts, x=x, norm=lw["mlp_norm"], w_router=lw["w_router"],
                w_gate=lw["w_gate"], w_up=lw["w_up"], w_down=lw["w_down"],
            )  # fmt: skip
            b.emit(
                MOE, {"eps": eps, **SHARED_ROUTING},
                out=shared, experts=shared_experts, x=x, norm=lw["mlp_norm"], w_router=lw["shared_router"],
                w_gate=lw["shared_gate"], w_up=lw["shared_up"], w_down=lw["shared_down"],
            )  # fmt: skip
            b.emit(REDUCE_RESIDUAL, x=x, partial=shared)
        else:
            b.emit(
                GATE_UP_SWIGLU, {"eps": eps},
                out=act, x=x, norm=lw["mlp_norm"], w_gate=lw["w_gate"], w_up=lw["w_up"],
            )  # fmt: skip
            b.emit(LINEAR, out=partial, a=act, w=lw["w_down"])
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(
        LM_HEAD, {"eps": eps},
        logits=logits, x=x, rows=step["logit_rows"], norm=w["norm"], w=w[TABLE.head_name(c)],
    )  # fmt: skip
    return b.build()


head = partial(head_of, TABLE)  # the last call, for programs that apply it to other rows
