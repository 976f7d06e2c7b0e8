"""Matrix products with a weight [N, K] stored row by row: out = a · wᵀ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.ops.cases.linear import (
    Dot,
    dot_bf16,
    dot_f32,
    dot_int8,
    linear_bound,
    linear_cases,
    linear_residual_bound,
    linear_residual_cases,
)
from pegainfer.ops.spec import Arrays, Case, In, InOut, OpSpec, Out, Tolerance, Weight, declare
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]

_F32 = "a float32 sum of K products in eight lanes or more errs by (K/8 + 16) · 2^-24 of their magnitudes"
_INT8 = "activations rounded to int8 by blocks of 32: eight standard deviations of the rounding errors' sum"


_BF16 = "activations rounded to bf16: eight standard deviations of the rounding errors' sum"


def product_tolerance(bound: Callable[[Dot], Callable[[Case], Arrays]]) -> dict[str, Tolerance]:
    """Tolerances of an op whose error is that of its products: in float32, with int8 or bf16 activations."""
    return {
        "f32": Tolerance(2.0**-23, 0.0, _F32, bound(dot_f32)),
        "int8": Tolerance(2.0**-23, 0.0, _INT8, bound(dot_int8)),
        "bf16": Tolerance(2.0**-23, 0.0, _BF16, bound(dot_bf16)),
    }


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
        cases=linear_cases,
        tolerance=product_tolerance(linear_bound),
    )
)

LINEAR_RESIDUAL = declare(
    OpSpec(
        name="linear_residual",
        doc="x += a · wᵀ",
        operands=(InOut("x", "T N"), In("a", "T K"), Weight("w", "N K")),
        reference=_linear_residual,
        flops=lambda s: matmul_flops(s) + s["T"] * s["N"],
        cases=linear_residual_cases,
        tolerance=product_tolerance(linear_residual_bound),
    )
)
