"""Root-mean-square normalisation (arXiv:1910.07467).

The factor is the weight as it is given. A model whose factor is 1 + w adds the 1 in float32 when its weights
are loaded, so that no kernel has to know.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.pointwise import (
    gated_norm_bound,
    gated_norm_cases,
    head_norm_cases,
    norm_bound,
    rms_norm_cases,
)
from pegainfer.ops.recurrence import sigmoid
from pegainfer.ops.spec import In, InOut, OpSpec, Out, Tolerance, declare

Array = np.ndarray[Any, Any]

_WHY = "a float32 sum of n squares errs by n · 2^-24 at most, its root by half of that"


def _rms_norm(out: Array, x: Array, weight: Array, *, eps: float) -> None:
    x64 = x.astype(np.float64)
    out[...] = x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


RMS_NORM = declare(
    OpSpec(
        name="rms_norm",
        doc="out = x / sqrt(mean(x², over M) + eps) · weight",
        operands=(Out("out", "T M"), In("x", "T M"), In("weight", "M")),
        attrs=("eps",),
        reference=_rms_norm,
        flops=lambda s: 4 * s["T"] * s["M"],
        cases=rms_norm_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, _WHY, norm_bound("out"))},
    )
)


def _head_norm(x: Array, weight: Array, *, eps: float) -> None:
    _rms_norm(x, x.copy(), weight, eps=eps)


HEAD_NORM = declare(
    OpSpec(
        name="head_norm",
        doc="rms_norm of each head in place (QK-norm of Qwen3)",
        operands=(InOut("x", "T H D"), In("weight", "D")),
        attrs=("eps",),
        reference=_head_norm,
        flops=lambda s: 4 * s["T"] * s["H"] * s["D"],
        cases=head_norm_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, _WHY, norm_bound("x"))},
    )
)


def _gated_rms_norm(out: Array, x: Array, gate: Array, weight: Array, *, eps: float) -> None:
    normed, g = np.empty(x.shape), gate.astype(np.float64)
    _rms_norm(normed, x, weight, eps=eps)
    out[...] = normed * g * sigmoid(g)


GATED_RMS_NORM = declare(
    OpSpec(
        name="gated_rms_norm",
        doc="out = rms_norm of each head of x · silu(gate) (the output of Qwen3.5's linear attention)",
        operands=(Out("out", "T H D"), In("x", "T H D"), In("gate", "T H D"), In("weight", "D")),
        attrs=("eps",),
        reference=_gated_rms_norm,
        flops=lambda s: 10 * s["T"] * s["H"] * s["D"],
        cases=gated_norm_cases,
        tolerance={"f32": Tolerance(1e-6, 0.0, _WHY + "; silu by 16 · 2^-24", gated_norm_bound)},
    )
)
