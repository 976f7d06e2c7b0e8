"""The ops a forward is written in. Each is declared by the finer ops it is made of; a backend may fuse it."""

from __future__ import annotations

from collections.abc import Mapping

import pegainfer.ops.gated_delta
import pegainfer.ops.mla
import pegainfer.ops.moe_shard  # noqa: F401  (they declare their ops)
from pegainfer.ops.activation import SILU_MUL
from pegainfer.ops.attention import KV_APPEND, SCALES
from pegainfer.ops.cases.fused import (
    gate_up_bound,
    gate_up_cases,
    gated_qkv_bound,
    gated_qkv_cases,
    lm_head_bound,
    lm_head_cases,
    qkv_bound,
    qkv_cases,
)
from pegainfer.ops.embed import GATHER_ROWS
from pegainfer.ops.fill import rotation
from pegainfer.ops.gemm import LINEAR, product_tolerance
from pegainfer.ops.norm import HEAD_NORM, RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.rope import ROPE
from pegainfer.ops.spec import INTS, In, OpSpec, Out, Role, State, Weight, declare
from pegainfer.ops.tensor import CACHED, Sizes, Tensor


def _qkv(
    b: Builder,
    q: Tensor,
    kv: Tensor,
    x: Tensor,
    norm: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    eps: float,
    layer: int,
    k_scale: float,
    v_scale: float,
) -> None:
    tokens, _, head_dim = q.shape
    kv_heads = kv.shape[3]
    h = b.buffer("h", *x.shape, dtype=q.dtype)
    k = b.buffer("k", tokens, kv_heads, head_dim, dtype=q.dtype)
    v = b.buffer("v", tokens, kv_heads, head_dim, dtype=q.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    for out, w in ((q, wq), (k, wk), (v, wv)):
        b.emit(LINEAR, out=out.view(tokens, w.shape[0]), a=h, w=w)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:  # Qwen3 normalises each head before the rotation
            b.emit(HEAD_NORM, {"eps": eps}, x=part, weight=weight)
    b.emit(ROPE, x=q, positions=positions, cos_sin=cos_sin)
    b.emit(ROPE, x=k, positions=positions, cos_sin=cos_sin)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    b.emit(KV_APPEND, {"layer": layer, **scales}, kv=kv, k=k, v=v, slots=slots)


def _gated_qkv(
    b: Builder, q: Tensor, gate: Tensor, kv: Tensor, x: Tensor, norm: Tensor, wg: Tensor, *, eps: float,
    layer: int, k_scale: float, v_scale: float, **others: Tensor | None,
) -> None:  # fmt: skip
    attrs = {"eps": eps, "layer": layer, "k_scale": k_scale, "v_scale": v_scale}
    h = b.buffer("h", *x.shape, dtype=q.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    b.emit(LINEAR, out=gate, a=h, w=wg)
    b.emit(QKV_NORM_ROPE_APPEND, attrs, q=q, kv=kv, x=x, norm=norm, **others)


def _gate_up(
    b: Builder, out: Tensor, x: Tensor, norm: Tensor, w_gate: Tensor, w_up: Tensor, *, eps: float
) -> None:
    h = b.buffer("h", *x.shape, dtype=out.dtype)
    gate = b.buffer("gate", *out.shape, dtype=out.dtype)
    up = b.buffer("up", *out.shape, dtype=out.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    b.emit(LINEAR, out=gate, a=h, w=w_gate)
    b.emit(LINEAR, out=up, a=h, w=w_up)
    b.emit(SILU_MUL, out=out, gate=gate, up=up)


def _lm_head(
    b: Builder, logits: Tensor, x: Tensor, rows: Tensor, norm: Tensor, w: Tensor, *, eps: float
) -> None:
    picked = b.buffer("picked", rows.shape[0], x.shape[1], dtype=x.dtype)
    h = b.buffer("h", rows.shape[0], x.shape[1], dtype=x.dtype)
    b.emit(GATHER_ROWS, out=picked, x=x, rows=rows)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=picked, weight=norm)
    b.emit(LINEAR, out=logits, a=h, w=w)


def qkv_bytes(s: Sizes, held: Mapping[str, int]) -> int:
    cached = held["kv"] // (s["N"] * s["Y"] * s["S"]) * s["T"]
    return sum(held[name] for name in ("q", "x", "norm", "wq", "wk", "wv")) + cached


QKV_NORM_ROPE_APPEND = declare(
    OpSpec(
        name="qkv_norm_rope_append",
        doc="q, k, v from the normalised residual stream; heads normalised where asked; rotated; k, v cached",
        operands=(
            Out("q", "T H D"),
            State("kv", "N Y 2 G S D", CACHED),
            In("x", "T M"),
            In("norm", "M"),
            Weight("wq", "A M"),
            Weight("wk", "B M"),
            Weight("wv", "B M"),
            In("positions", "T", INTS, into="P"),
            In("slots", "T", INTS, into="N S"),
            In("cos_sin", "P D", ("f32",), fill=rotation),
            In("q_norm", "D", optional=True),
            In("k_norm", "D", optional=True),
        ),
        attrs=("eps", "layer", *SCALES),
        defaults=SCALES,
        idle="NYP",
        requires=(
            ("A = H · D", lambda s: s["A"] == s["H"] * s["D"]),
            ("B = G · D", lambda s: s["B"] == s["G"] * s["D"]),
        ),
        lower=_qkv,
        cases=qkv_cases,
        tolerance=product_tolerance(qkv_bound),
        flops=lambda s: 2 * s["T"] * s["M"] * (s["A"] + 2 * s["B"]),
        bytes=qkv_bytes,
    )
)

_Q, *_QKV = QKV_NORM_ROPE_APPEND.operands
_TO_WEIGHTS = next(i for i, o in enumerate(_QKV) if o.role is Role.WEIGHT)

GATED_QKV_NORM_ROPE_APPEND = declare(
    OpSpec(
        name="gated_qkv_norm_rope_append",
        doc="qkv_norm_rope_append, and the output gate that the same normalised stream gives",
        operands=(
            _Q,
            Out("gate", "T A"),
            *_QKV[:_TO_WEIGHTS],
            Weight("wg", "A M"),
            *_QKV[_TO_WEIGHTS:],
        ),
        attrs=QKV_NORM_ROPE_APPEND.attrs,
        defaults=SCALES,
        idle=QKV_NORM_ROPE_APPEND.idle,
        requires=QKV_NORM_ROPE_APPEND.requires,
        lower=_gated_qkv,
        cases=gated_qkv_cases,
        tolerance=product_tolerance(gated_qkv_bound),
        flops=lambda s: QKV_NORM_ROPE_APPEND.flops(s) + 2 * s["T"] * s["M"] * s["A"],
        bytes=lambda s, held: qkv_bytes(s, held) + held["gate"] + held["wg"],
    )
)

GATE_UP_SWIGLU = declare(
    OpSpec(
        name="gate_up_swiglu",
        doc="out = silu(h · w_gateᵀ) · (h · w_upᵀ) with h = rms_norm(x)",
        operands=(
            Out("out", "T F"),
            In("x", "T M"),
            In("norm", "M"),
            Weight("w_gate", "F M"),
            Weight("w_up", "F M"),
        ),
        attrs=("eps",),
        lower=_gate_up,
        cases=gate_up_cases,
        tolerance=product_tolerance(gate_up_bound),
        flops=lambda s: 4 * s["T"] * s["M"] * s["F"],
    )
)

LM_HEAD = declare(
    OpSpec(
        name="lm_head",
        doc="logits of the wanted rows only: rms_norm(x[rows]) · wᵀ",
        operands=(
            Out("logits", "L V", ("f32",)),
            In("x", "T M"),
            In("rows", "L", INTS, into="T"),
            In("norm", "M"),
            Weight("w", "V M"),
        ),
        attrs=("eps",),
        lower=_lm_head,
        idle="T",
        cases=lm_head_cases,
        tolerance=product_tolerance(lm_head_bound),
        flops=lambda s: 2 * s["L"] * s["M"] * s["V"],
        bytes=lambda s, held: held["logits"] + held["w"] + held["logits"] // s["V"] * s["M"],
    )
)
