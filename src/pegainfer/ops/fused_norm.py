"""Fused forms of a norm that is folded into the GEMM that follows it; see ops/fused.py.

`linear_residual_norm` leaves x · weight, not yet scaled, and sums of squares of x. The GEMM after it
multiplies x · weight, and scales its result by 1 / sqrt(mean(x²) + eps), which is the same for all columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.coarse import GATE_UP_SWIGLU, QKV_NORM_ROPE_APPEND
from pegainfer.ops.fill import rotation
from pegainfer.ops.fused_heads import GATE_WEIGHT, PROJECT_HEADS, QKV_WEIGHTS, finish, project, project_flops
from pegainfer.ops.gemm import LINEAR_RESIDUAL
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Out, State, Weight, declare_fused, run_op
from pegainfer.ops.tensor import CACHED

Array = np.ndarray[Any, Any]
SQUARES_OF = 32  # columns at the most whose squares are summed together, within a tile


def _linear_residual_norm(
    x: Array, normed: Array, squares: Array, a: Array, w: Array, norm: Array, *, tile: int
) -> None:
    run_op(LINEAR_RESIDUAL, x, a, w)
    normed[...] = x.astype(np.float64) * norm.astype(np.float64)
    squares[...] = 0
    column = np.arange(x.shape[1])
    part = column // tile * -(-tile // SQUARES_OF) + column % tile // SQUARES_OF
    for token, values in enumerate(x.astype(np.float64)):
        squares[:, token] = np.bincount(part, values**2, minlength=len(squares))


def _reduce_residual_norm(
    x: Array, normed: Array, squares: Array, partial: Array, norm: Array, *, part: int
) -> None:
    run_op(REDUCE_RESIDUAL, x, partial)
    normed[...] = x.astype(np.float64) * norm.astype(np.float64)
    squares[...] = 0
    for token, values in enumerate(x.astype(np.float64)):
        parts = np.arange(len(values)) // part
        squares[:, token] = np.bincount(parts, values**2, minlength=len(squares))


def scaled(x: Array, squares: Array, eps: float) -> Array:
    """rms_norm of the rows whose product with the norm's weight is x."""
    total = squares[:, : len(x)].astype(np.float64).sum(axis=0)
    scaled: Array = x.astype(np.float64) / np.sqrt(total / x.shape[1] + eps)[:, None]
    return scaled


def _swiglu(out: Array, h: Array, w_gate: Array, w_up: Array) -> None:
    gate, up = (h @ w.astype(np.float64).T for w in (w_gate, w_up))
    out[...] = gate * np.exp(-np.logaddexp(0.0, -gate)) * up


def _scaled_gate_up(out: Array, x: Array, squares: Array, w_gate: Array, w_up: Array, *, eps: float) -> None:
    _swiglu(out, scaled(x, squares, eps), w_gate, w_up)


LINEAR_RESIDUAL_NORM = declare_fused(
    OpSpec(
        name="linear_residual_norm",
        doc="x += a · wᵀ; normed = x · norm; squares: sums of x² over parts of each row, by part and token",
        operands=(
            InOut("x", "T N"),
            Out("normed", "T N"),
            Out("squares", "Z X", ("f32",)),  # X: room for tokens, at least T
            In("a", "T K"),
            Weight("w", "N K"),
            In("norm", "N"),
        ),
        attrs=("tile",),  # columns; parts are up to SQUARES_OF columns of one tile
        reference=_linear_residual_norm,
        flops=lambda s: LINEAR_RESIDUAL.flops(s) + 3 * s["T"] * s["N"],
    )
)

REDUCE_RESIDUAL_NORM = declare_fused(
    OpSpec(
        name="reduce_residual_norm",
        doc="x += the sum over ranks of partial; normed and squares as linear_residual_norm leaves them",
        operands=(
            InOut("x", "T N"),
            Out("normed", "T N"),
            Out("squares", "Z X", ("f32",)),  # X: room for tokens, at least T
            In("partial", "T N", ("f32",)),
            In("norm", "N"),
        ),
        attrs=("part",),  # columns whose squares are summed together
        reference=_reduce_residual_norm,
        flops=lambda s: 4 * s["T"] * s["N"],
    )
)

SCALED_GATE_UP_SWIGLU = declare_fused(
    OpSpec(
        name="scaled_gate_up_swiglu",
        doc="gate_up_swiglu of x that linear_residual_norm has left",
        operands=(
            Out("out", "T F"),
            In("x", "T M"),
            In("squares", "Z X", ("f32",)),
            Weight("w_gate", "F M"),
            Weight("w_up", "F M"),
        ),
        attrs=("eps",),
        reference=_scaled_gate_up,
        flops=GATE_UP_SWIGLU.flops,
    )
)


def _scaled_project_heads(heads: Array, x: Array, squares: Array, *, eps: float, **weights: Array) -> None:
    project(heads, scaled(x, squares, eps), **weights)


def _scaled_qkv(
    q: Array,
    kv: Array,
    x: Array,
    squares: Array,
    wq: Array,
    wk: Array,
    wv: Array,
    positions: Array,
    slots: Array,
    cos_sin: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    eps: float,
    layer: int,
    **scales: float,
) -> None:
    heads = np.empty((len(x), q.shape[1] + 2 * kv.shape[3], q.shape[2]))
    project(heads, scaled(x, squares, eps), wq, wk, wv)
    q[...] = finish(kv, heads, q.shape[1], positions, slots, cos_sin, q_norm, k_norm, eps, layer, scales)


SCALED_PROJECT_HEADS = declare_fused(
    OpSpec(
        name="scaled_project_heads",
        doc="project_heads of x that linear_residual_norm has left",
        operands=(
            Out("heads", "T E D"),
            In("x", "T M"),
            In("squares", "Z X", ("f32",)),
            *QKV_WEIGHTS,
            GATE_WEIGHT,
        ),
        attrs=("eps",),
        reference=_scaled_project_heads,
        flops=project_flops,
        requires=PROJECT_HEADS.requires,
    )
)

SCALED_QKV_ROPE_APPEND = declare_fused(
    OpSpec(
        name="scaled_qkv_rope_append",
        doc="qkv_norm_rope_append of x that linear_residual_norm has left",
        operands=(
            Out("q", "T H D"),
            State("kv", "N Y 2 G S D", CACHED),
            In("x", "T M"),
            In("squares", "Z X", ("f32",)),
            *QKV_WEIGHTS,
            In("positions", "T", INTS, into="P"),
            In("slots", "T", INTS, into="N S"),
            In("cos_sin", "P D", ("f32",), fill=rotation),
            In("q_norm", "D", optional=True),
            In("k_norm", "D", optional=True),
        ),
        attrs=QKV_NORM_ROPE_APPEND.attrs,
        defaults=QKV_NORM_ROPE_APPEND.defaults,
        reference=_scaled_qkv,
        bytes=lambda s, held: (
            held["q"]
            + held["x"]
            + held["squares"]
            + held["wq"]
            + held["wk"]
            + held["wv"]
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s["T"]
        ),
        idle="NYP",
        flops=QKV_NORM_ROPE_APPEND.flops,
        requires=QKV_NORM_ROPE_APPEND.requires,
    )
)
