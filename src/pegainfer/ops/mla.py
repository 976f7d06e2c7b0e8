"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

A token is cached as one row of D numbers that all heads share: K of a normalised latent and B of a rotated
key. A head's keys and values are products of the latent with matrices of that head. Instead of expanding
them, `mla_attention` multiplies the query by the key matrix and the attended latent by the value matrix
(the absorbed form): attention itself has one KV head whose values are the first K numbers of its keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.mla import (
    head_linear_bound,
    head_linear_cases,
    latent_append_bound,
    latent_append_cases,
    latent_attention_bound,
    latent_attention_cases,
    rope_tail_bound,
    rope_tail_cases,
)
from pegainfer.ops.cases.mla_layer import (
    mla_attention_bound,
    mla_attention_cases,
    mla_qkv_bound,
    mla_qkv_cases,
)
from pegainfer.ops.fill import rotation
from pegainfer.ops.gemm import LINEAR, product_tolerance
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.rope import rotate_halves
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Out, State, Tolerance, Weight, declare
from pegainfer.ops.tensor import Tensor

Array = np.ndarray[Any, Any]


def _head_linear(out: Array, a: Array, w: Array) -> None:
    rows, width = w.shape[1:]
    out[..., :rows] = np.einsum("thk,hnk->thn", a[..., :width].astype(np.float64), w.astype(np.float64))
    out[..., rows:] = a[..., width:]


def _rope_tail(x: Array, positions: Array, cos_sin: Array) -> None:
    tail = x[..., x.shape[-1] - cos_sin.shape[1] :]
    tail[...] = rotate_halves(tail, cos_sin[positions][:, None])


def _latent_append(
    kv: Array, latent: Array, norm: Array, positions: Array, slots: Array, cos_sin: Array, *, layer: int,
    eps: float,
) -> None:  # fmt: skip
    rank = len(norm)
    c = latent[:, :rank].astype(np.float64)
    c = c / np.sqrt(np.mean(c**2, axis=1, keepdims=True) + eps) * norm.astype(np.float64)
    row = np.concatenate([c, rotate_halves(latent[:, rank:], cos_sin[positions])], axis=1)
    kv[slots // kv.shape[2], layer, slots % kv.shape[2]] = row


def _latent_attention(
    out: Array, q: Array, kv: Array, query_starts: Array, query_lens: Array, context_lens: Array,
    block_table: Array, *, layer: int, scale: float,
) -> None:  # fmt: skip
    for row, context in enumerate(context_lens):
        first, stop = query_starts[row], query_starts[row] + query_lens[row]
        blocks = block_table[row, : -(-int(context) // kv.shape[2])]
        keys = kv[blocks, layer].reshape(-1, kv.shape[3]).astype(np.float64)
        for t in range(first, stop):
            seen = keys[: context - (stop - 1 - t)]
            scores = q[t].astype(np.float64) @ seen.T * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[t] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : out.shape[2]]


def _mla_qkv(
    b: Builder, q: Tensor, kv: Tensor, x: Tensor, norm: Tensor, wq: Tensor, w_latent: Tensor,
    latent_norm: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, wq_down: Tensor | None = None,
    q_norm: Tensor | None = None, *, eps: float, latent_eps: float, layer: int,
) -> None:  # fmt: skip
    tokens = x.shape[0]
    h = b.buffer("h", *x.shape, dtype=q.dtype)
    latent = b.buffer("latent", tokens, w_latent.shape[0], dtype=q.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    b.emit(LINEAR, out=latent, a=h, w=w_latent)
    if wq_down is not None:
        down = b.buffer("q_down", tokens, wq_down.shape[0], dtype=q.dtype)
        narrow = b.buffer("q_narrow", tokens, wq_down.shape[0], dtype=q.dtype)
        b.emit(LINEAR, out=down, a=h, w=wq_down)
        b.emit(RMS_NORM, {"eps": latent_eps}, out=narrow, x=down, weight=q_norm)
        h = narrow
    b.emit(LINEAR, out=q.view(tokens, wq.shape[0]), a=h, w=wq)
    b.emit(ROPE_TAIL, x=q, positions=positions, cos_sin=cos_sin)
    b.emit(
        LATENT_APPEND, {"layer": layer, "eps": latent_eps},
        kv=kv, latent=latent, norm=latent_norm, positions=positions, slots=slots, cos_sin=cos_sin,
    )  # fmt: skip


def _mla_attention(
    b: Builder, out: Tensor, q: Tensor, kv: Tensor, w_k: Tensor, w_v: Tensor, *, layer: int, scale: float,
    **rows: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads = q.shape[:2]
    absorbed = b.buffer("absorbed", tokens, heads, kv.shape[3], dtype=q.dtype)
    attended = b.buffer("attended", tokens, heads, w_k.shape[1], dtype=q.dtype)
    b.emit(HEAD_LINEAR, out=absorbed, a=q, w=w_k)
    b.emit(LATENT_ATTENTION, {"layer": layer, "scale": scale}, out=attended, q=absorbed, kv=kv, **rows)
    b.emit(HEAD_LINEAR, out=out, a=attended, w=w_v)


HEAD_LINEAR = declare(
    OpSpec(
        name="head_linear",
        doc="out = a · w[h]ᵀ of the first K channels of each head h, which has a matrix; the rest copied",
        operands=(Out("out", "T H A"), In("a", "T H B"), Weight("w", "H N K")),
        reference=_head_linear,
        flops=lambda s: 2 * s["T"] * s["H"] * s["N"] * s["K"],
        cases=head_linear_cases,
        tolerance=product_tolerance(head_linear_bound),
        requires=(("A - N = B - K ≥ 0", lambda s: s["A"] - s["N"] == s["B"] - s["K"] >= 0),),
    )
)

ROPE_TAIL = declare(
    OpSpec(
        name="rope_tail",
        doc="rotates the last B channels of each head: pairs (i, i + B/2) by positions[t] · frequency[i]",
        operands=(
            InOut("x", "T H D"),
            In("positions", "T", INTS, into="P"),
            In("cos_sin", "P B", ("f32",), fill=rotation),
        ),
        idle="PD",
        reference=_rope_tail,
        flops=lambda s: 3 * s["T"] * s["H"] * s["B"],
        bytes=lambda s, held: 2 * (held["x"] // s["D"]) * s["B"] + held["positions"] + 4 * s["T"] * s["B"],
        cases=rope_tail_cases,
        tolerance={
            "f32": Tolerance(
                0.0, 0.0, "two float32 products and their sum, whose terms may cancel", rope_tail_bound
            )
        },
        requires=(("B even, B ≤ D", lambda s: s["B"] % 2 == 0 and s["B"] <= s["D"]),),
    )
)

LATENT_APPEND = declare(
    OpSpec(
        name="latent_append",
        doc="caches a row for token t: rms_norm of its first K channels, and its last B rotated",
        operands=(
            State("kv", "N Y S D"),
            In("latent", "T D"),
            In("norm", "K"),
            In("positions", "T", INTS, into="P"),
            In("slots", "T", INTS, into="N S"),
            In("cos_sin", "P B", ("f32",), fill=rotation),
        ),
        attrs=("layer", "eps"),
        idle="NYP",
        reference=_latent_append,
        flops=lambda s: s["T"] * (4 * s["K"] + 3 * s["B"]),
        bytes=lambda s, held: (
            held["latent"]
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s["T"]
            + held["norm"]
            + held["positions"]
            + held["slots"]
            + 4 * s["T"] * s["B"]
        ),
        cases=latent_append_cases,
        tolerance={
            "f32": Tolerance(
                0.0,
                0.0,
                "a float32 sum of K squares and its root; products that may cancel",
                latent_append_bound,
            )
        },
        requires=(("D = K + B, B even", lambda s: s["D"] == s["K"] + s["B"] and s["B"] % 2 == 0),),
    )
)

LATENT_ATTENTION = declare(
    OpSpec(
        name="latent_attention",
        doc="causal softmax(q · cᵀ · scale) · c[:K] over cached rows c, which all heads share",
        operands=(
            Out("out", "T H K"),
            In("q", "T H D"),
            State("kv", "N Y S D"),
            In("query_starts", "R", INTS),
            In("query_lens", "R", INTS),
            In("context_lens", "R", INTS),
            In("block_table", "R W", INTS, into="N"),
        ),
        attrs=("layer", "scale"),
        idle="NYW",
        cost_axes="CQ",
        reference=_latent_attention,
        flops=lambda s: 2 * s.get("Q", s["T"]) * s["H"] * (s["D"] + s["K"]),
        bytes=lambda s, held: (
            held["q"] + held["out"] + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s.get("C", s["T"])
        ),
        cases=latent_attention_cases,
        tolerance={
            "f32": Tolerance(
                2.0**-23,
                0.0,
                "scores are float32 dot products of D; their absolute error is the weights' relative one",
                latent_attention_bound,
            )
        },
        requires=(("K ≤ D", lambda s: s["K"] <= s["D"]),),
    )
)

MLA_QKV_APPEND = declare(
    OpSpec(
        name="mla_qkv_append",
        doc="queries of the normalised stream, rotated, and its latent, cached",
        operands=(
            Out("q", "T H F"),
            State("kv", "N Y S D"),
            In("x", "T M"),
            In("norm", "M"),
            Weight("wq", "A X"),
            Weight("w_latent", "D M"),
            In("latent_norm", "K"),
            In("positions", "T", INTS, into="P"),
            In("slots", "T", INTS, into="N S"),
            In("cos_sin", "P B", ("f32",), fill=rotation),
            Weight("wq_down", "X M", optional=True),  # without it X is M
            In("q_norm", "X", optional=True),
        ),
        attrs=("eps", "latent_eps", "layer"),
        idle="NYP",
        requires=(
            ("A = H · F", lambda s: s["A"] == s["H"] * s["F"]),
            ("D = K + B, B even", lambda s: s["D"] == s["K"] + s["B"] and s["B"] % 2 == 0),
            ("B ≤ F", lambda s: s["B"] <= s["F"]),
        ),
        lower=_mla_qkv,
        cases=mla_qkv_cases,
        tolerance=product_tolerance(mla_qkv_bound),
        flops=lambda s: 2 * s["T"] * (s["A"] * s["X"] + s["D"] * s["M"]),
        bytes=lambda s, held: (
            sum(held.get(name, 0) for name in ("q", "x", "norm", "wq", "w_latent", "wq_down"))
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s["T"]
        ),
    )
)

MLA_ATTENTION = declare(
    OpSpec(
        name="mla_attention",
        doc="latent_attention of absorbed queries, and each head's values of what it attended",
        operands=(
            Out("out", "T H A"),
            In("q", "T H F"),
            LATENT_ATTENTION.operand("kv"),
            Weight("w_k", "H K X"),
            Weight("w_v", "H A K"),
            *LATENT_ATTENTION.operands[3:],
        ),
        attrs=("layer", "scale"),
        idle="NYW",
        cost_axes="CQ",
        requires=(("D - K = F - X ≥ 0", lambda s: s["D"] - s["K"] == s["F"] - s["X"] >= 0),),
        lower=_mla_attention,
        cases=mla_attention_cases,
        tolerance={
            "f32": Tolerance(2.0**-23, 0.0, "the errors of its parts, carried on", mla_attention_bound)
        },
        flops=lambda s: (
            2 * s["T"] * s["H"] * s["K"] * (s["X"] + s["A"])
            + 2 * s.get("Q", s["T"]) * s["H"] * (s["D"] + s["K"])
        ),
        bytes=lambda s, held: (
            sum(held[name] for name in ("out", "q", "w_k", "w_v"))
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s.get("C", s["T"])
        ),
    )
)
