"""How near 16-bit arithmetic can come: an op's reference with every intermediate result rounded, and how a
kernel's error compares with that of the rounding alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pegainfer.ops.compose import dtype_name, one_call, staged_inputs
from pegainfer.ops.program import OpCall
from pegainfer.ops.quantize import quantize
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.spec import Arrays, OpSpec, Role
from pegainfer.runtime.weights.dequant import dequantize

Array = np.ndarray[Any, Any]

# A unit in the last place; what the reference errs by, rounded after each of its ops, comes on top.
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
# Kernels round in another order than the reference does, and a row may have few elements.
MEAN, MOST = 2.0, 3.0
# Units allowed on top: an element that three roundings made (SwiGLU: gate, up, product) is off by 1.5 at most
# where the reference's roundings happened to cancel.
UNITS = 1.5
WRITTEN = (Role.OUT, Role.INOUT, Role.STATE)
# Float32 in any arithmetic; the delta rule's states unless they are asked for in bf16.
PARAMETERS = (
    "norm", "weight", "q_norm", "k_norm", "latent_norm", "cos_sin", "taps", "a_log", "dt_bias", "out_norm",
    "delta",
)  # fmt: skip
LEAST = 1e-37  # denormals have fewer bits


def rounded(a: Array, dtype: str) -> Array:
    """Float32 values that the 16-bit dtype holds exactly."""
    plain = np.ascontiguousarray(a, np.float32)
    if dtype == "f16":
        return plain.astype(np.float16).astype(np.float32)
    near = dequantize("bf16", quantize("bf16", plain), plain.shape)
    return np.where(np.isfinite(plain), near, plain)


def run_rounding(
    spec: OpSpec,
    sizes: Mapping[str, int],
    arrays: Arrays,
    attrs: Mapping[str, Any],
    dtype: str,
    exact: Collection[str] = PARAMETERS,
) -> None:
    """The reference with every intermediate result rounded to `dtype`, as a framework stores it.

    Writes outputs and states into `arrays`, which hold float32.

    Args:
        exact: operands that are not rounded.
    """

    def round_results(call: OpCall, bound: Mapping[str, Array]) -> None:
        for o in call.spec.operands:
            rounds = o.role in WRITTEN and dtype in o.dtypes and o.name not in exact
            if rounds and call.tensors[o.name].name != "logits":
                bound[o.name][...] = rounded(bound[o.name], dtype)

    program = one_call(spec, sizes, {k: dtype_name(a) for k, a in arrays.items()}, attrs)
    kept = [o.name for o in spec.operands if o.role in (Role.WEIGHT, Role.STATE)]
    held = {name: arrays[name] for name in kept if name in arrays}
    executor = ReferenceExecutor(program, held)
    for name, value in executor.run(staged_inputs(spec, arrays), sizes, round_results).items():
        arrays[name][...] = value


def share_of_rounding(got: Array, exact: Array, stepwise: Array, dtype: str) -> float:
    """A result's error, as a share of what is allowed: 1 is the most.

    Args:
        exact: the reference.
        stepwise: the same with every intermediate result rounded.
    """
    if not got.size:
        return 0.0
    ours, theirs = row_errors(got, exact), row_errors(stepwise, exact)
    mean, by_rounding = (float(np.sqrt(np.mean(e**2))) for e in (ours, theirs))
    unit = UNITS * UNIT[dtype]
    shares = mean / (MEAN * by_rounding + unit), float(ours.max()) / (MOST * float(theirs.max()) + unit)
    return float("inf") if any(np.isnan(shares)) else max(shares)


def row_errors(got: Array, want: Array) -> Array:
    """Each row's error relative to its norm; rows are along the last axis."""
    g, w = (a.astype(np.float64).reshape(-1, a.shape[-1] if a.ndim else 1) for a in (got, want))
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(np.where(same, 0.0, g - w), axis=1)
    norm = np.linalg.norm(np.where(np.isnan(w), 0.0, w), axis=1)
    return np.asarray(error / (norm + LEAST) * (error > LEAST))
