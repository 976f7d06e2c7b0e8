"""Gated activations: of the feed-forward block, and of attention's output."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.pointwise import (
    sigmoid_gate_bound,
    sigmoid_gate_cases,
    silu_mul_bound,
    silu_mul_cases,
)
from pegainfer.ops.recurrence import sigmoid
from pegainfer.ops.spec import In, InOut, OpSpec, Out, Tolerance, declare

Array = np.ndarray[Any, Any]


def _silu_mul(out: Array, gate: Array, up: Array) -> None:
    g = gate.astype(np.float64)
    out[...] = g * sigmoid(g) * up.astype(np.float64)


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


def _sigmoid_gate(x: Array, gate: Array) -> None:
    x[...] = x.astype(np.float64) * sigmoid(gate.astype(np.float64))


SIGMOID_GATE = declare(
    OpSpec(
        name="sigmoid_gate",
        doc="x = x · sigmoid(gate) (the gate of Qwen3.5's full attention, arXiv:2505.06708)",
        operands=(InOut("x", "T A"), In("gate", "T A")),
        reference=_sigmoid_gate,
        flops=lambda s: 4 * s["T"] * s["A"],
        cases=sigmoid_gate_cases,
        tolerance={
            "f32": Tolerance(
                1e-6,
                0.0,
                "exp of a float32 within 4 ulp, a sum, a division, a product: 16 · 2^-24 in all",
                sigmoid_gate_bound,
            )
        },
    )
)
