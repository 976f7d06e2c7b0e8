"""Every op with a kernel, on every instruction set, against the reference of its one declaration."""

from __future__ import annotations

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401
from pegainfer.kernels.cpu.instructions import OPCODES
from pegainfer.kernels.cpu.library import has_bf16
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.kv import to_reference
from pegainfer.ops.attention import KV_APPEND
from pegainfer.ops.delta import GATED_DELTA_RULE
from pegainfer.ops.float8 import E4M3, from_e4m3
from pegainfer.ops.program import Builder
from pegainfer.ops.spec import REGISTRY, OpSpec, Role
from tests.cpu.kernels.harness import FORMATS, ISAS, QUANTISED, TABLES, check, runner, weights_in

SPECS = [spec for spec in REGISTRY.values() if spec.name in OPCODES]
WITH_WEIGHTS = [s for s in SPECS if any(o.role is Role.WEIGHT for o in s.operands)]
# Kernels of one tile are the same in all ops: a few suffice where a format is one of many of its kind.
FEW = ("linear", "embedding", "expert_down")
WITH_KEYS = [s for s in SPECS if any(E4M3 in o.dtypes for o in s.operands)]
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", WITH_KEYS, ids=lambda s: s.name)
def test_eight_bit_cache(spec: OpSpec, isa: str) -> None:
    check(spec, runner(CpuOptions(threads=2, isa=isa)), "f32", {"kv": E4M3})


@pytest.mark.parametrize("isa", ISAS)
def test_bf16_states(isa: str) -> None:
    check(GATED_DELTA_RULE, runner(CpuOptions(threads=2, isa=isa)), "f32", {"delta": "bf16"})


@pytest.mark.parametrize("isa", ISAS)
def test_clipped_values_are_counted(isa: str) -> None:
    """Those past 448 after scaling, infinite ones too, NaN not."""
    b = Builder("append")
    kv = b.state("kv", 2, 1, 2, 1, 16, 16, dtype=E4M3)
    k, v = (b.input(name, "T", 1, 16, dtype="f32") for name in "kv")
    scales = {"k_scale": 0.5, "v_scale": 1.0}
    b.emit(KV_APPEND, {"layer": 0, **scales}, kv=kv, k=k, v=v, slots=b.input("slots", "T"))
    cache = np.zeros((2, 1, 2, 1, 16, 16), np.uint8)
    executor = CpuBackend({}, CpuOptions(2, isa)).prepare(b.build(), {"kv": cache}, {"T": 2})
    keys, values = np.zeros((2, 2, 1, 16), np.float32)
    keys[0, 0, :4] = 224, -224.0001, 300, np.nan
    values[1, 0, :4] = 448, -448.0001, np.inf, -np.inf
    inputs = {"k": keys, "v": values, "slots": np.array([3, 17], np.int32)}
    executor.run(inputs, {"T": 2})
    assert executor.clipped == 5
    held = from_e4m3(to_reference(cache))
    assert held[0, 0, 0, 0, 3, :3].tolist() == [448, -448, 448] and np.isnan(held[0, 0, 0, 0, 3, 3])
    assert held[1, 0, 1, 0, 1, :4].tolist() == [448, -448, 448, -448]
    executor.run({**inputs, "k": values, "v": values}, {"T": 2})
    assert executor.clipped == 12
