"""Fused forms of what stands between a projection to heads and attention; see ops/fused.py.

`project_heads` leaves q, k and v, and an output gate where there is one, as the projection made them.
`append_attention` normalises and rotates q and k, appends k and v to the cache, and attends; `gate_heads`
applies the gate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.activation import SIGMOID_GATE
from pegainfer.ops.attention import ATTENTION, KV_APPEND, SCALES
from pegainfer.ops.fill import rotation
from pegainfer.ops.norm import HEAD_NORM, RMS_NORM
from pegainfer.ops.rope import ROPE
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Out, State, Weight, declare_fused, run_op
from pegainfer.ops.tensor import CACHED, Sizes

Array = np.ndarray[Any, Any]


def project(heads: Array, h: Array, wq: Array, wk: Array, wv: Array, wg: Array | None = None) -> None:
    tokens, d = len(heads), heads.shape[-1]
    weights = [w for w in (wq, wk, wv, wg) if w is not None]
    parts = [(h @ w.astype(np.float64).T).reshape(tokens, -1, d) for w in weights]
    heads[...] = np.concatenate(parts, axis=1)


def _project_heads(heads: Array, x: Array, norm: Array, *, eps: float, **weights: Array) -> None:
    h = np.empty(x.shape)
    run_op(RMS_NORM, h, x, norm, eps=eps)
    project(heads, h, **weights)


def _gate_heads(x: Array, heads: Array) -> None:
    run_op(SIGMOID_GATE, x, heads[:, -x.shape[1] :])


def finish(
    kv: Array,
    heads: Array,
    query_heads: int,
    positions: Array,
    slots: Array,
    cos_sin: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    eps: float,
    layer: int,
    scales: dict[str, float],
) -> Array:
    """Appends k and v; returns q."""
    wide = heads.astype(np.float64)
    ends = np.cumsum([query_heads, kv.shape[3], kv.shape[3]])
    q, k, v, _ = np.split(wide, ends, axis=1)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            run_op(HEAD_NORM, part, weight, eps=eps)
        run_op(ROPE, part, positions, cos_sin)
    run_op(KV_APPEND, kv, k, v, slots, layer=layer, **scales)
    return q


def _append_attention(
    out: Array,
    kv: Array,
    heads: Array,
    positions: Array,
    slots: Array,
    cos_sin: Array,
    query_starts: Array,
    query_lens: Array,
    context_lens: Array,
    block_table: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    eps: float,
    layer: int,
    scale: float,
    **scales: float,
) -> None:
    q = finish(kv, heads, out.shape[1], positions, slots, cos_sin, q_norm, k_norm, eps, layer, scales)
    rows = (query_starts, query_lens, context_lens, block_table)
    run_op(ATTENTION, out, q, kv, *rows, layer=layer, scale=scale, **scales)


QKV_WEIGHTS = (Weight("wq", "A M"), Weight("wk", "B M"), Weight("wv", "B M"))
GATE_WEIGHT = Weight("wg", "A M", optional=True)  # whose heads come last


def project_flops(s: Sizes) -> int:
    return 2 * s["T"] * s["M"] * s["E"] * s["D"]


PROJECT_HEADS = declare_fused(
    OpSpec(
        name="project_heads",
        doc="the heads of q, k and v beside each other: rms_norm(x) · [wq; wk; wv]ᵀ",
        operands=(Out("heads", "T E D"), In("x", "T M"), In("norm", "M"), *QKV_WEIGHTS, GATE_WEIGHT),
        attrs=("eps",),
        reference=_project_heads,
        flops=project_flops,
        requires=(
            (
                "E · D = A + 2 · B, or 2 · A + 2 · B with a gate",
                lambda s: s["E"] * s["D"] - 2 * s["B"] in (s["A"], 2 * s["A"]),
            ),
        ),
    )
)

APPEND_ATTENTION = declare_fused(
    OpSpec(
        name="append_attention",
        doc="norm and rotation of projected heads, the cache's append, then attention",
        operands=(
            Out("out", "T H D"),
            State("kv", "N Y 2 G S D", CACHED),
            In("heads", "T E D"),
            In("positions", "T", INTS, into="P"),
            In("slots", "T", INTS, into="N S"),
            In("cos_sin", "P D", ("f32",), fill=rotation),
            In("query_starts", "R", INTS),
            In("query_lens", "R", INTS),
            In("context_lens", "R", INTS),
            In("block_table", "R W", INTS, into="N"),
            In("q_norm", "D", optional=True),
            In("k_norm", "D", optional=True),
        ),
        attrs=("eps", "layer", "scale", *SCALES),
        defaults=SCALES,
        reference=_append_attention,
        flops=ATTENTION.flops,
        # The step's own keys and values are written, all cached ones are read.
        bytes=lambda s, held: (
            held["out"]
            + held["heads"]
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * (s.get("C", s["T"]) + s["T"])
        ),
        idle="NYWP",
        cost_axes="CQ",
        requires=(
            *ATTENTION.requires,
            (
                "E = H + 2 · G, or 2 · H + 2 · G with a gate",
                lambda s: s["E"] - 2 * s["G"] in (s["H"], 2 * s["H"]),
            ),
        ),
    )
)

GATE_HEADS = declare_fused(
    OpSpec(
        name="gate_heads",
        doc="x = x · sigmoid(gate), where the gate is the last H of projected heads",
        operands=(InOut("x", "T H D"), In("heads", "T E D")),
        reference=_gate_heads,
        flops=lambda s: 4 * s["T"] * s["H"] * s["D"],
        bytes=lambda s, held: 3 * held["x"],
        idle="E",
    )
)
