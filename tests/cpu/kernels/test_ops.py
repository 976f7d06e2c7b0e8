"""Every op with a kernel, on every instruction set, against the reference of its one declaration."""

from __future__ import annotations

import pytest

import pegainfer.ops.coarse
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401
from pegainfer.kernels.cpu.instructions import OPCODES
from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.ops.spec import REGISTRY, OpSpec, Role
from tests.cpu.kernels.harness import FORMATS, ISAS, QUANTISED, TABLES, check, runner, weights_in

SPECS = [spec for spec in REGISTRY.values() if spec.name in OPCODES]
WITH_WEIGHTS = [s for s in SPECS if any(o.role is Role.WEIGHT for o in s.operands)]
# Kernels of one tile are the same in all ops: a few suffice where a format is one of many of its kind.
FEW = ("linear", "embedding", "expert_down")
WITH_CACHE = [s for s in SPECS if any(o.name == "kv" for o in s.operands)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_matches_the_reference(spec: OpSpec, isa: str) -> None:
    check(spec, runner(CpuOptions(threads=2, isa=isa)))


def named(value: OpSpec | str) -> str:
    return value if isinstance(value, str) else value.name


def pairs(dtypes: tuple[str, ...], arithmetic: str) -> list[tuple[OpSpec, str]]:
    """Ops with weights, in formats to test them with."""
    specs = [s for s in WITH_WEIGHTS if arithmetic in s.tolerance]
    return [(s, d) for s in specs for d in dtypes if d not in TABLES or s.name in FEW]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("spec", "dtype"), pairs((*FORMATS[1:3], *QUANTISED), "f32"), ids=named)
def test_weight_formats_exactly(spec: OpSpec, dtype: str, isa: str) -> None:
    check(spec, runner(CpuOptions(threads=2, isa=isa, activation="f32")), "f32", weights_in(spec, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("spec", "dtype"), pairs(QUANTISED, "int8"), ids=named)
def test_rounded_activations(spec: OpSpec, dtype: str, isa: str) -> None:
    check(spec, runner(CpuOptions(threads=2, isa=isa, activation="int8")), "int8", weights_in(spec, dtype))


@pytest.mark.skipif(not any(map(has_bf16, ISAS)), reason="this processor has no products of bf16")
@pytest.mark.parametrize("spec", [s for s in WITH_WEIGHTS if "bf16" in s.tolerance], ids=lambda s: s.name)
def test_activations_in_bf16(spec: OpSpec) -> None:
    options = CpuOptions(threads=2, activation="bf16")
    check(spec, runner(options), "bf16", weights_in(spec, "bf16"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", WITH_CACHE, ids=lambda s: s.name)
def test_half_precision_cache(spec: OpSpec, isa: str) -> None:
    check(spec, runner(CpuOptions(threads=2, isa=isa)), "f32", {"kv": "f16"})
