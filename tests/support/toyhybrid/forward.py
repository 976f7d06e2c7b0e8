"""The forward pass of the toy hybrid line, and its KV groups.

Axes: T tokens of the step, R rows, L rows whose logits are wanted, M the residual stream's width; attention
has H query heads of D channels; the mixer has B value heads of E channels and C channels of q, k and v.
"""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.kv.device.layout import GroupLayout, PageLayout, Part, StateLayout
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD, QKV_NORM_ROPE_APPEND
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.norm import GATED_RMS_NORM, RMS_NORM
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.sampler import Head
from pegainfer.runner.program import INPUTS, Formats, Sizes, shape
from tests.support.toyhybrid.config import ToyConfig
from tests.support.toyhybrid.weights import TABLE

# name -> shape; activations in Formats.activation.
BUFFERS: dict[str, tuple[str, ...]] = {
    "h": ("T", "M"),
    "qkv": ("T", "C"),
    "conv_out": ("T", "C"),
    "gate": ("T", "B", "E"),
    "a": ("T", "B"),
    "beta": ("T", "B"),
    "mixed": ("T", "B", "E"),
    "normed": ("T", "B", "E"),
    "q": ("T", "H", "D"),
    "attn": ("T", "H", "D"),
    "act": ("T", "F"),
}


def groups(config: ToyConfig, block_size: int, formats: Formats) -> tuple[GroupLayout, ...]:
    """Pages of keys and values; states of the convolution's last inputs and the delta rule's matrices."""
    c = config
    pages = (c.num_layers, 2, c.num_kv_heads, block_size, c.head_dim)
    conv = (c.num_layers, c.conv_width - 1, c.conv_size)
    delta = (c.num_layers, c.delta_heads, c.delta_dim, c.delta_dim)
    return (
        PageLayout("kv", (Part("kv", pages, formats.kv),), block_size),
        StateLayout(
            "mix", (Part("conv", conv, formats.activation), Part("delta", delta, "f32")), c.snapshot_every
        ),
    )


def forward(config: ToyConfig, weights: Mapping[str, str], sizes: Sizes, formats: Formats) -> Program:
    """Token ids to logits: x [T, M] and logits [L, V] are its outputs.

    Args:
        weights: storage format of each weight by its name in weights.py.
    """
    c, f = config, formats
    b = Builder("toy")
    w = {name: b.weight(name, *dims, dtype=weights[name]) for name, dims in TABLE.shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.head_dim, dtype="f32")
    pages, states = sizes.pages(b, "kv"), sizes.states(b, "mix")
    step = {name: b.input(name, *letters) for name, letters in INPUTS.items()}
    rows = {name: step[name] for name in ("query_starts", "query_lens", "context_lens")}
    mixer_rows = {**rows, "state_ids": states.state_ids, "state_saves": states.state_saves}
    axes = {
        "M": c.hidden_size, "C": c.conv_size, "B": c.delta_heads, "E": c.delta_dim, "H": c.num_heads,
        "D": c.head_dim, "F": c.intermediate_size,
    }  # fmt: skip
    h, qkv, conv_out, gate, a, beta, mixed, normed, q, attn, act = (
        b.buffer(n, *shape(letters, axes), dtype=f.activation) for n, letters in BUFFERS.items()
    )
    x = b.output("x", "T", c.hidden_size, dtype=f.residual)
    logits = b.output("logits", "L", c.vocab_size)
    eps = c.norm_eps

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=step["token_ids"])
    for layer in range(c.num_layers):
        (
            mix_norm, w_qkv, w_gate_out, w_a, w_b, taps, a_log, dt_bias, out_norm, w_out, attn_norm, wq, wk,
            wv, wo, mlp_norm, w_gate, w_up, w_down,
        ) = (w[e.name.format(layer)] for e in TABLE.layer)  # fmt: skip
        b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=mix_norm)
        b.emit(LINEAR, out=qkv, a=h, w=w_qkv)
        b.emit(LINEAR, out=gate.view("T", c.delta_size), a=h, w=w_gate_out)
        b.emit(LINEAR, out=a, a=h, w=w_a)
        b.emit(LINEAR, out=beta, a=h, w=w_b)
        b.emit(
            CAUSAL_CONV_SILU, {"layer": layer},
            out=conv_out, conv=states.parts["conv"], x=qkv, taps=taps, **mixer_rows,
        )  # fmt: skip
        b.emit(
            GATED_DELTA_RULE, {"layer": layer, "eps": eps},
            out=mixed, delta=states.parts["delta"], qkv=conv_out, a=a, b=beta, a_log=a_log, dt_bias=dt_bias,
            **mixer_rows,
        )  # fmt: skip
        b.emit(GATED_RMS_NORM, {"eps": eps}, out=normed, x=mixed, gate=gate, weight=out_norm)
        b.emit(LINEAR_RESIDUAL, x=x, a=normed.view("T", c.delta_size), w=w_out)
        b.emit(
            QKV_NORM_ROPE_APPEND, {"eps": eps, "layer": layer},
            q=q, kv=pages.parts["kv"], x=x, norm=attn_norm, wq=wq, wk=wk, wv=wv,
            positions=step["positions"], slots=pages.places, cos_sin=cos_sin,
        )  # fmt: skip
        b.emit(
            ATTENTION, {"layer": layer, "scale": c.head_dim**-0.5},
            out=attn, q=q, kv=pages.parts["kv"], block_table=pages.block_table, **rows,
        )  # fmt: skip
        b.emit(LINEAR_RESIDUAL, x=x, a=attn.view("T", c.q_size), w=wo)
        b.emit(GATE_UP_SWIGLU, {"eps": eps}, out=act, x=x, norm=mlp_norm, w_gate=w_gate, w_up=w_up)
        b.emit(LINEAR_RESIDUAL, x=x, a=act, w=w_down)
    b.emit(
        LM_HEAD, {"eps": eps},
        logits=logits, x=x, rows=step["logit_rows"], norm=w["norm"], w=w[TABLE.head_name(c)],
    )  # fmt: skip
    return b.build()


def head(config: ToyConfig, weights: Mapping[str, str], residual: str) -> Head:
    """The forward's last call, for programs that apply it to other rows."""
    name = TABLE.head_name(config)
    return Head(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, eps=config.norm_eps, norm="norm",
        norm_format=weights["norm"], weight=name, weight_format=weights[name], residual=residual,
    )  # fmt: skip
