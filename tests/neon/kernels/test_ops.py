"""Every op with a kernel, as tests/cpu/kernels/test_ops.py has it, on an emulated 64-bit Arm processor."""

from __future__ import annotations

import pytest

from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.spec import OpSpec
from tests.cpu.kernels.harness import FORMATS, QUANTISED, check, weights_in
from tests.cpu.kernels.test_ops import SPECS, WITH_CACHE, WITH_KEYS, WITH_WEIGHTS
from tests.support.replay.client import Replay, replayer


@pytest.mark.parametrize("isa", ["neon", "portable"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_matches_the_reference(spec: OpSpec, isa: str, replay: Replay) -> None:
    check(spec, replayer(replay, CpuOptions(threads=2, isa=isa)))
    assert replay.isa == isa


@pytest.mark.parametrize("dtype", FORMATS[1:])
@pytest.mark.parametrize("spec", WITH_WEIGHTS, ids=lambda s: s.name)
def test_weight_formats_exactly(spec: OpSpec, dtype: str, replay: Replay) -> None:
    options = CpuOptions(threads=2, isa="neon", activation="f32")
    check(spec, replayer(replay, options), "f32", weights_in(spec, dtype))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("spec", [s for s in WITH_WEIGHTS if "int8" in s.tolerance], ids=lambda s: s.name)
def test_rounded_activations(spec: OpSpec, dtype: str, replay: Replay) -> None:
    options = CpuOptions(threads=2, isa="neon", activation="int8")
    check(spec, replayer(replay, options), "int8", weights_in(spec, dtype))


@pytest.mark.parametrize("spec", WITH_CACHE, ids=lambda s: s.name)
def test_half_precision_cache(spec: OpSpec, replay: Replay) -> None:
    check(spec, replayer(replay, CpuOptions(threads=2, isa="neon")), "f32", {"kv": "f16"})


@pytest.mark.parametrize("spec", WITH_KEYS, ids=lambda s: s.name)
def test_eight_bit_cache(spec: OpSpec, replay: Replay) -> None:
    check(spec, replayer(replay, CpuOptions(threads=2, isa="neon")), "f32", {"kv": E4M3})
