"""Matrix products with a weight [N, K] stored row by row: out = a · wᵀ."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.spec import In, InOut, OpSpec, Out, Weight, declare
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]


def _product(a: Array, w: Array) -> Array:
    result: Array = a.astype(np.float64) @ w.astype(np.float64).T
    return result


def _linear(out: Array, a: Array, w: Array) -> None:
    out[...] = _product(a, w)


def _linear_residual(x: Array, a: Array, w: Array) -> None:
    x[...] = x.astype(np.float64) + _product(a, w)


def matmul_flops(s: Sizes) -> int:
    return 2 * s["T"] * s["N"] * s["K"]


LINEAR = declare(
    OpSpec(
        name="linear",
        doc="out = a · wᵀ",
        operands=(Out("out", "T N"), In("a", "T K"), Weight("w", "N K")),
        reference=_linear,
        flops=matmul_flops,
    )
)

LINEAR_RESIDUAL = declare(
    OpSpec(
        name="linear_residual",
        doc="x += a · wᵀ",
        operands=(InOut("x", "T N"), In("a", "T K"), Weight("w", "N K")),
        reference=_linear_residual,
        flops=lambda s: matmul_flops(s) + s["T"] * s["N"],
    )
)
