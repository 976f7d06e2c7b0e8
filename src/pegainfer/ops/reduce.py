"""Where a forward states that a sum over ranks belongs.

A matrix whose columns are shared out to ranks gives each a part of its GEMM's result. The forward emits
`linear` into a buffer of float32, in which ranks add up, and `reduce_residual`, which adds the sum to the
residual stream. One rank has the whole result: the two calls are then one `linear_residual`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.linear import reduce_residual_cases
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import In, InOut, OpSpec, Tolerance, declare

Array = np.ndarray[Any, Any]


def _reduce_residual(x: Array, partial: Array) -> None:
    x[...] = x.astype(np.float64) + partial.astype(np.float64)


def _fold(before: OpCall, call: OpCall) -> OpCall | None:
    """The GEMM that adds to the residual itself, where `before` made the partial result."""
    partial, x = call.tensors["partial"], call.tensors["x"]
    if before.spec is not LINEAR or before.tensors["out"].storage is not partial.storage:
        return None
    return OpCall.of(LINEAR_RESIDUAL, {}, x=x, a=before.tensors["a"], w=before.tensors["w"])


REDUCE_RESIDUAL = declare(
    OpSpec(
        name="reduce_residual",
        doc="x += the sum over ranks of partial; the reference is that of one rank",
        operands=(InOut("x", "T N"), In("partial", "T N", ("f32",))),
        reference=_reduce_residual,
        flops=lambda s: s["T"] * s["N"],
        cases=reduce_residual_cases,
        tolerance={"f32": Tolerance(2.0**-23, 0.0, "one float32 addition")},
        fold=_fold,
    )
)
