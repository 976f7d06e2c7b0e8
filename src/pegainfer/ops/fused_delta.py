"""The fused form of gated_delta whose norm was folded into the GEMM before it; see ops/fused_norm.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE, ROWS
from pegainfer.ops.fused_norm import scaled
from pegainfer.ops.gated_delta import (
    ATTRS,
    OUTPUTS,
    REQUIRES,
    VECTORS,
    WEIGHTS,
    layer_bytes,
    layer_flops,
)
from pegainfer.ops.norm import GATED_RMS_NORM
from pegainfer.ops.spec import In, OpSpec, declare_fused, run_op

Array = np.ndarray[Any, Any]


def _scaled_gated_delta(
    out: Array,
    conv: Array,
    delta: Array,
    x: Array,
    squares: Array,
    w_qkv: Array,
    w_z: Array,
    w_a: Array,
    w_b: Array,
    taps: Array,
    a_log: Array,
    dt_bias: Array,
    out_norm: Array,
    *,
    layer: int,
    eps: float,
    key_eps: float,
    tiled: int,
    **rows: Array,
) -> None:
    h = scaled(x, squares, eps)
    qkv, z, a, b = (h @ w.astype(np.float64).T for w in (w_qkv, w_z, w_a, w_b))
    convolved, mixed = np.empty(qkv.shape), np.empty(out.shape)
    places = [rows[o.name] for o in ROWS]
    run_op(CAUSAL_CONV_SILU, convolved, conv, qkv, taps, *places, layer=layer)
    gates = (a, b, a_log, dt_bias)
    run_op(GATED_DELTA_RULE, mixed, delta, convolved, *gates, *places, layer=layer, eps=key_eps, tiled=tiled)
    run_op(GATED_RMS_NORM, out, mixed, z.reshape(out.shape), out_norm, eps=eps)


SCALED_GATED_DELTA = declare_fused(
    OpSpec(
        name="scaled_gated_delta",
        doc="gated_delta of x that linear_residual_norm has left",
        operands=(
            *OUTPUTS,
            In("x", "T M"),
            In("squares", "Z I", ("f32",)),
            *WEIGHTS,
            *VECTORS,
            *ROWS,
        ),
        attrs=ATTRS,
        reference=_scaled_gated_delta,
        idle="NY",
        sequential=True,
        flops=layer_flops,
        bytes=lambda s, held: layer_bytes(s, held) + held["squares"],
        requires=REQUIRES,
    )
)
