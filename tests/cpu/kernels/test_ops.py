"""Every op with a kernel, on every instruction set, against the reference of its one declaration."""

from __future__ import annotations

from zlib import crc32

import pytest

import pegainfer.ops.coarse
import pegainfer.ops.sample  # noqa: F401
from pegainfer.kernels.cpu.backend import CpuOptions
from pegainfer.kernels.cpu.lower import INSTRUCTIONS
from pegainfer.ops.check import check_case, suitable_cases
from pegainfer.ops.spec import REGISTRY, OpSpec, Role
from tests.cpu.kernels.harness import FORMATS, ISAS, QUANTISED, runner

SPECS = [spec for spec in REGISTRY.values() if spec.name in INSTRUCTIONS]
WITH_WEIGHTS = [s for s in SPECS if any(o.role is Role.WEIGHT for o in s.operands)]
WITH_CACHE = [s for s in SPECS if any(o.name == "kv" for o in s.operands)]


def check(spec: OpSpec, options: CpuOptions, arithmetic: str, dtypes: dict[str, str]) -> None:
    run, faults, count = runner(options), [], 0
    for case in suitable_cases(spec, crc32(spec.name.encode()), dtypes):
        report = check_case(spec, case, run, arithmetic=arithmetic, dtypes=dtypes)
        faults += [f"{report.label}: {fault}" for fault in report.faults]
        count += 1
    assert count, f"{spec.name} has no case for {dtypes}"
    assert not faults, "\n".join(faults)


def weights_in(spec: OpSpec, dtype: str) -> dict[str, str]:
    return {o.name: dtype for o in spec.operands if o.role is Role.WEIGHT}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_matches_the_reference(spec: OpSpec, isa: str) -> None:
    check(spec, CpuOptions(threads=2, isa=isa), "f32", {})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FORMATS[1:])
@pytest.mark.parametrize("spec", WITH_WEIGHTS, ids=lambda s: s.name)
def test_weight_formats_exactly(spec: OpSpec, dtype: str, isa: str) -> None:
    check(spec, CpuOptions(threads=2, isa=isa, activation="f32"), "f32", weights_in(spec, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("spec", [s for s in WITH_WEIGHTS if "int8" in s.tolerance], ids=lambda s: s.name)
def test_rounded_activations(spec: OpSpec, dtype: str, isa: str) -> None:
    check(spec, CpuOptions(threads=2, isa=isa, activation="int8"), "int8", weights_in(spec, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", WITH_CACHE, ids=lambda s: s.name)
def test_half_precision_cache(spec: OpSpec, isa: str) -> None:
    check(spec, CpuOptions(threads=2, isa=isa), "f32", {"kv": "f16"})
