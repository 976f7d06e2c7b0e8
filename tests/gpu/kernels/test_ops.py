"""Every op with CUDA kernels against its declaration's reference and hostile cases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.lora_layers
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor  # noqa: F401  (registers the ops)
from pegainfer.lower.cuda.lowering import HANDLERS
from pegainfer.lower.cuda.moe import MOST_CHOSEN
from pegainfer.ops import float8
from pegainfer.ops.check import check_case, suitable_cases
from pegainfer.ops.compose import one_call, run_reference, staged_inputs
from pegainfer.ops.delta import GATED_DELTA_RULE
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.rounding import PARAMETERS, rounded, run_rounding, share_of_rounding
from pegainfer.ops.spec import REGISTRY, Case, OpSpec, Role
from pegainfer.runtime.weights.weight import Weight
from tests.gpu.harness import raw, run_once, runner

Array = np.ndarray[Any, Any]
SPECS = [s for s in REGISTRY.values() if s.name in HANDLERS or s.lower is not None]
NO_HALVES = ("moe", "expert_gate_up", "expert_down")  # refused in float16
SIXTEEN = [
    (spec, dtype)
    for spec in SPECS
    for dtype in ("bf16", "f16")
    if any(dtype in o.dtypes and o.role is not Role.WEIGHT for o in spec.operands)
    and not (dtype == "f16" and spec.name in NO_HALVES)
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_float32_matches_the_reference(spec: OpSpec, ctx: CudaContext) -> None:
    run, faults, count = runner(ctx), [], 0
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        if spec.name == "route_experts" and case.sizes["K"] > MOST_CHOSEN:
            continue  # refused: tests/null/lower/cuda/test_moe.py
        report = check_case(spec, case, run)
        faults += [f"{report.label}: {fault}" for fault in report.faults]
        count += 1
    assert count, f"{spec.name} has no case"
    assert not faults, "\n".join(faults)


def caches(spec: OpSpec) -> tuple[str, ...]:
    """What the op's KV cache may be stored as."""
    return next((o.dtypes for o in spec.operands if o.paged), ())


def cache_faults(got: Array, want: Array, stepwise: Array) -> list[str]:
    """Bits that are more than one number from the reference's, bf16's own error aside.

    stepwise: the reference's where every intermediate result is rounded.
    """
    g, w, s = (float8.from_e4m3(a) for a in (got, want, stepwise))
    nan = np.isnan(w)
    row = np.abs(np.where(nan, 0, w)).max(axis=-1, keepdims=True)
    allowed = float8.STEP * np.maximum(np.abs(g), np.abs(w)) + float8.LEAST + row / 32 + np.abs(s - w)
    wrong = (np.isnan(g) != nan) | ~nan & ~(np.abs(g - w) <= allowed)
    if not wrong.any():
        return []
    at = tuple(np.argwhere(wrong)[0].tolist())
    return [
        f"{int(wrong.sum())} of {wrong.size} wrong, the first at {at}: {g[at]} for {w[at]} ± {allowed[at]}"
    ]


def fits(spec: OpSpec, case: Case) -> bool:
    """Whether the 16-bit kernels take the case: attention has those head sizes only."""
    return spec.name != "attention" or case.sizes["D"] in (64, 128, 256)


def storable(spec: OpSpec, case: Case, dtype: str) -> bool:
    """Whether neither the case's values nor what follows from them leave float16's range."""
    most = {k: float(np.abs(a[np.isfinite(a)]).max(initial=0)) for k, a in case.arrays.items()}
    weights = {o.name for o in spec.operands if o.role is Role.WEIGHT}
    floats = {k: m for k, m in most.items() if case.arrays[k].dtype == np.float32}
    return dtype == "bf16" or all(m < (4000 if k in weights else 100) for k, m in floats.items())


@pytest.mark.parametrize(("spec", "dtype"), SIXTEEN, ids=lambda v: getattr(v, "name", v))
def test_sixteen_bits_are_as_near_as_they_can_be(spec: OpSpec, dtype: str, ctx: CudaContext) -> None:
    count, faults = 0, []
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        if fits(spec, case) and storable(spec, case, dtype):
            faults += check_sixteen(spec, case, dtype, ctx)
            count += 1
    assert count, f"{spec.name} has no case"
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("spec", [s for s in SPECS if E4M3 in caches(s)], ids=lambda s: s.name)
def test_a_cache_of_eight_bits_beside_bf16(spec: OpSpec, ctx: CudaContext) -> None:
    count, faults = 0, []
    for case in suitable_cases(spec, crc32(spec.name.encode()), {"kv": E4M3}):
        heads = case.sizes["D"] in (64, 128, 256) or spec.name == "kv_append"
        if heads:
            faults += check_sixteen(spec, case, "bf16", ctx, E4M3)
            count += 1
    assert count > 3, f"{spec.name} has few cases"
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("spec", [GATED_DELTA_RULE, GATED_DELTA], ids=lambda s: s.name)
def test_states_of_bf16(spec: OpSpec, ctx: CudaContext) -> None:
    """In heads of other sizes they are refused: tests/null/lower/cuda/test_delta.py."""
    count, faults = 0, []
    parameters = [name for name in PARAMETERS if name != "delta"]
    for case in suitable_cases(spec, crc32(spec.name.encode())):
        if case.sizes["K"] == 128 and case.sizes["V"] % 32 == 0:
            faults += check_sixteen(spec, case, "bf16", ctx, exact=parameters)
            count += 1
    assert count > 3, f"{spec.name} has few cases"
    assert not faults, "\n".join(faults)


def check_sixteen(
    spec: OpSpec,
    case: Case,
    dtype: str,
    ctx: CudaContext,
    cache: str | None = None,
    exact: Collection[str] = PARAMETERS,
) -> list[str]:
    """`cache`: what keys and values are stored as; None: as `dtype`. `exact`: what is stored as float32."""
    stored = {
        o.name: dtype if dtype in o.dtypes and o.name not in exact else o.dtypes[0] for o in spec.operands
    }
    if cache is not None:
        stored["kv"] = cache
    arrays, weights = {}, dict[str, Weight]()
    for o in spec.operands:
        if o.role is Role.OUT:
            shape = tuple(case.sizes[a] for a in o.axes)
            kind = {"i32": np.int32}.get(stored[o.name], np.float32)
            arrays[o.name] = np.zeros(shape, kind)
        elif o.name in case.arrays:
            a = case.arrays[o.name]
            arrays[o.name] = rounded(a, dtype) if stored[o.name] == dtype else a
            if stored[o.name] == E4M3:
                arrays[o.name] = float8.to_e4m3(a)
            if o.role is Role.WEIGHT:
                weights[o.name] = raw(arrays[o.name], dtype)
    want, stepwise = ({k: a.copy() for k, a in arrays.items()} for _ in range(2))
    run_reference(spec, case.sizes, want, case.attrs)
    run_rounding(spec, case.sizes, stepwise, case.attrs, dtype, exact)
    if any(
        not np.isfinite(stepwise[k][np.isfinite(a)]).all() for k, a in want.items() if a.dtype.kind == "f"
    ):
        return []  # an intermediate result leaves the dtype's range
    given = {k: a.copy() for k, a in arrays.items()}
    program = one_call(spec, case.sizes, {k: stored[k] for k in arrays}, case.attrs)
    states = {o.name: given[o.name] for o in spec.operands if o.role is Role.STATE}
    outputs = run_once(ctx, program, weights, states, staged_inputs(spec, given), case.sizes)
    faults = []
    for name, got in {**outputs, **states}.items():
        if stored[name] == E4M3:
            found = cache_faults(got, want[name], stepwise[name])
            faults += [f"{spec.name}, {case.label}: {name}: {f}" for f in found]
            continue
        share = share_of_rounding(got, want[name], stepwise[name], dtype)
        if not share <= 1:
            faults.append(f"{spec.name}, {case.label}: {name} errs by {share:.2f} of what rounding explains")
    return faults
