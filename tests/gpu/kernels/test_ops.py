"""Every op with CUDA kernels against its declaration's reference and hostile cases."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.sample  # noqa: F401
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.executor import CudaExecutor  # noqa: F401  (registers the ops)
from pegainfer.kernels.cuda.site import HANDLERS
from pegainfer.ops.check import check_case, suitable_cases
from pegainfer.ops.compose import dtype_name, one_call, run_reference, staged_inputs
from pegainfer.ops.program import OpCall
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.spec import REGISTRY, Case, OpSpec, Role
from pegainfer.runtime.weights.raw import RawWeight
from tests.gpu.harness import raw, rounded, run_once, runner

SPECS = [s for s in REGISTRY.values() if s.name in HANDLERS or s.lower is not None]
SIXTEEN = [s for s in SPECS if any("bf16" in o.dtypes and o.role is not Role.WEIGHT for o in s.operands)]
WRITTEN = (Role.OUT, Role.INOUT, Role.STATE)
PARAMETERS = ("norm", "weight", "q_norm", "k_norm", "cos_sin")  # float32 in any arithmetic
# A unit in the last place; what the reference errs by, rounded after each of its ops, comes on top.
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_float32_matches_the_reference(spec: OpSpec, ctx: CudaContext) -> None:
    run, faults, count = runner(ctx), [], 0
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        report = check_case(spec, case, run)
        faults += [f"{report.label}: {fault}" for fault in report.faults]
        count += 1
    assert count, f"{spec.name} has no case"
    assert not faults, "\n".join(faults)


def fits(spec: OpSpec, case: Case) -> bool:
    """Whether the 16-bit kernels take the case: attention has those head sizes only."""
    return spec.name != "attention" or case.sizes["D"] in (64, 128, 256)


def storable(spec: OpSpec, case: Case, dtype: str) -> bool:
    """Whether neither the case's values nor what follows from them leave float16's range."""
    most = {k: float(np.abs(a[np.isfinite(a)]).max(initial=0)) for k, a in case.arrays.items()}
    weights = {o.name for o in spec.operands if o.role is Role.WEIGHT}
    floats = {k: m for k, m in most.items() if case.arrays[k].dtype == np.float32}
    return dtype == "bf16" or all(m < (4000 if k in weights else 100) for k, m in floats.items())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("spec", SIXTEEN, ids=lambda s: s.name)
def test_sixteen_bits_are_as_near_as_they_can_be(spec: OpSpec, dtype: str, ctx: CudaContext) -> None:
    count, faults = 0, []
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        if fits(spec, case) and storable(spec, case, dtype):
            faults += check_sixteen(spec, case, dtype, ctx)
            count += 1
    assert count or dtype == "f16", f"{spec.name} has no case"
    assert not faults, "\n".join(faults)


def check_sixteen(spec: OpSpec, case: Case, dtype: str, ctx: CudaContext) -> list[str]:
    stored = {
        o.name: dtype if dtype in o.dtypes and o.name not in PARAMETERS else o.dtypes[0]
        for o in spec.operands
    }
    arrays, weights = {}, dict[str, RawWeight]()
    for o in spec.operands:
        if o.role is Role.OUT:
            shape = tuple(case.sizes[a] for a in o.axes)
            kind = {"i32": np.int32}.get(stored[o.name], np.float32)
            arrays[o.name] = np.zeros(shape, kind)
        elif o.name in case.arrays:
            a = case.arrays[o.name]
            arrays[o.name] = rounded(a, dtype) if stored[o.name] == dtype else a
            if o.role is Role.WEIGHT:
                weights[o.name] = raw(arrays[o.name], dtype)
    exact, stepwise = ({k: a.copy() for k, a in arrays.items()} for _ in range(2))
    run_reference(spec, case.sizes, exact, case.attrs)
    run_rounding(spec, case, stepwise, dtype)
    given = {k: a.copy() for k, a in arrays.items()}
    program = one_call(spec, case.sizes, {k: stored[k] for k in arrays}, case.attrs)
    states = {o.name: given[o.name] for o in spec.operands if o.role is Role.STATE}
    outputs = run_once(ctx, program, weights, states, staged_inputs(spec, given), case.sizes)
    faults = []
    for name, got in {**outputs, **states}.items():
        ours, theirs = row_errors(got, exact[name]), row_errors(stepwise[name], exact[name])
        mean, by_rounding = (float(np.sqrt(np.mean(e**2))) if e.size else 0.0 for e in (ours, theirs))
        most = float(np.max(ours, initial=0)) <= 3 * np.max(theirs, initial=0) + UNIT[dtype]
        if not (mean <= 2 * by_rounding + UNIT[dtype] and most):  # two ways of rounding, few rows
            faults.append(
                f"{spec.name}, {case.label}: {name} off by {mean:.2e}, rounding by {by_rounding:.2e}"
            )
    return faults


def run_rounding(spec: OpSpec, case: Case, arrays: dict[str, np.ndarray], dtype: str) -> None:
    """The reference with every intermediate result rounded to `dtype`, as a framework stores it."""

    def round_results(call: OpCall, bound: Mapping[str, np.ndarray]) -> None:
        for o in call.spec.operands:
            if o.role in WRITTEN and dtype in o.dtypes and call.tensors[o.name].name != "logits":
                bound[o.name][...] = rounded(bound[o.name], dtype)

    program = one_call(spec, case.sizes, {k: dtype_name(a) for k, a in arrays.items()}, case.attrs)
    held = {o.name: arrays[o.name] for o in spec.operands if o.role in (Role.WEIGHT, Role.STATE)}
    executor = ReferenceExecutor(program, held)
    for name, value in executor.run(staged_inputs(spec, arrays), case.sizes, round_results).items():
        arrays[name][...] = value


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Each row's error relative to its norm; rows are along the last axis."""
    g, w = (a.astype(np.float64).reshape(-1, a.shape[-1] if a.ndim else 1) for a in (got, want))
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(np.where(same, 0.0, g - w), axis=1)
    norm = np.linalg.norm(np.where(np.isnan(w), 0.0, w), axis=1)
    least = 1e-37  # denormals have fewer bits
    return np.asarray(error / (norm + least) * (error > least))
