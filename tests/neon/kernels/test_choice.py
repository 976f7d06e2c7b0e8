"""Which kernels an Arm processor gets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.lower.cpu.backend import CpuOptions
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.program import Builder
from pegainfer.ops.quantize import quantized_weight
from tests.support.replay.client import Replay


def run_linear(replay: Replay, isa: str | None) -> None:
    rng = np.random.default_rng(5)
    a, w = (rng.standard_normal((n, 64)).astype(np.float32) for n in (3, 20))
    b = Builder("one")
    b.emit(
        LINEAR, out=b.output("out", "T", 20), a=b.input("a", "T", 64, dtype="f32"),
        w=b.weight("w", 20, 64, dtype="f32"),
    )  # fmt: skip
    options = CpuOptions(threads=1, isa=isa)
    out = replay.run(options, b.build(), {"w": quantized_weight("f32", w)}, {}, {"a": a}, {"T": 3})["out"]
    np.testing.assert_allclose(out, a @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("cpu", "best"), [("neoverse-n1", "neon"), ("max", "neon"), ("cortex-a72", "portable")]
)
def test_the_best_that_the_processor_runs(cpu: str, best: str, replay_on: Callable[[str], Replay]) -> None:
    replay = replay_on(cpu)
    run_linear(replay, None)
    assert replay.isa == best


def test_a_processor_without_the_dot_product(replay_on: Callable[[str], Replay]) -> None:
    with pytest.raises(OpError, match="no kernels for neon"):
        run_linear(replay_on("cortex-a72"), "neon")
