"""Every op with CUDA kernels against its declaration's reference and hostile cases."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.sample  # noqa: F401
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.executor import CudaExecutor  # noqa: F401  (registers the ops)
from pegainfer.kernels.cuda.site import HANDLERS
from pegainfer.ops.check import check_case, suitable_cases
from pegainfer.ops.compose import one_call, run_reference, staged_inputs
from pegainfer.ops.spec import REGISTRY, Case, OpSpec, Role
from pegainfer.runtime.weights.raw import RawWeight
from tests.gpu.harness import raw, rounded, run_once, runner

SPECS = [s for s in REGISTRY.values() if s.name in HANDLERS or s.lower is not None]
SIXTEEN = [s for s in SPECS if any("bf16" in o.dtypes and o.role is not Role.WEIGHT for o in s.operands)]
PARAMETERS = ("norm", "weight", "q_norm", "k_norm", "cos_sin")  # float32 in any arithmetic
# Of a row's norm: a handful of roundings to 8 (bf16) or 11 (f16) bits along the way.
ALLOWED = {"bf16": 1.5e-2, "f16": 2e-3}


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


def storable(case: Case, dtype: str) -> bool:
    floats = [a for a in case.arrays.values() if a.dtype == np.float32]
    most = max((float(np.abs(a[np.isfinite(a)]).max(initial=0)) for a in floats), default=0.0)
    return dtype == "bf16" or most < 200


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("spec", SIXTEEN, ids=lambda s: s.name)
def test_sixteen_bits_are_as_near_as_they_can_be(spec: OpSpec, dtype: str, ctx: CudaContext) -> None:
    count, faults = 0, []
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        if fits(spec, case) and storable(case, dtype):
            faults += check_sixteen(spec, case, dtype, ctx)
            count += 1
    assert count, f"{spec.name} has no case"
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
    want = {k: a.copy() for k, a in arrays.items()}
    run_reference(spec, case.sizes, want, case.attrs)
    given = {k: a.copy() for k, a in arrays.items()}
    dtypes = {k: stored[k] for k in arrays}
    program = one_call(spec, case.sizes, dtypes, case.attrs)
    states = {o.name: given[o.name] for o in spec.operands if o.role is Role.STATE}
    outputs = run_once(ctx, program, weights, states, staged_inputs(spec, given), case.sizes)
    faults = []
    for name, got in {**outputs, **states}.items():
        share = worst_row(got, want[name])
        if not share <= ALLOWED[dtype]:
            faults.append(f"{spec.name}, {case.label}: {name} off by {share:.2e} of a row")
    return faults


def worst_row(got: np.ndarray, want: np.ndarray) -> float:
    """The greatest error of a row relative to its norm; rows are along the last axis."""
    g, w = (a.astype(np.float64).reshape(-1, a.shape[-1] if a.ndim else 1) for a in (got, want))
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        error = np.linalg.norm(np.where(same, 0.0, g - w), axis=1)
    norm = np.linalg.norm(np.where(np.isnan(w), 0.0, w), axis=1)
    least = 1e-37 if want.dtype == np.float32 else 0.0  # denormals have fewer bits
    return float(np.max(error / (norm + least + 1e-300) * (error > least), initial=0.0))
