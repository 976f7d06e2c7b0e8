"""Gated activations of the feed-forward block."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.pointwise import silu_mul_bound, silu_mul_cases
from pegainfer.ops.spec import In, OpSpec, Out, Tolerance, declare

Array = np.ndarray[Any, Any]


def _silu_mul(out: Array, gate: Array, up: Array) -> None:
    g = gate.astype(np.float64)
    out[...] = g * np.exp(-np.logaddexp(0.0, -g)) * up.astype(np.float64)


SILU_MUL = declare(
    OpSpec(
        name="silu_mul",
        doc="out = gate · sigmoid(gate) · up (SwiGLU, arXiv:2002.05202)",
        operands=(Out("out", "T F"), In("gate", "T F"), In("up", "T F")),
        reference=_silu_mul,
        flops=lambda s: 6 * s["T"] * s["F"],
        cases=silu_mul_cases,
        tolerance={
            "f32": Tolerance(
                1e-6,
                0.0,
                "exp of a float32 within 4 ulp, a sum, a division, two products: 16 · 2^-24 in all",
                silu_mul_bound,
            )
        },
    )
)
