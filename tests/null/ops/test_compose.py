"""Many calls of one op as a program: what they share, what each has of its own."""

from __future__ import annotations

import numpy as np

from pegainfer.ops.compose import STAGED, STAGED_ROWS, many_calls
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.tensor import Kind

SIZES = {"T": 2, "N": 3, "K": 4}
DTYPES = {"a": "f32", "w": "f32"}


def test_own_operands_are_numbered_and_the_rest_is_shared() -> None:
    program = many_calls(LINEAR, SIZES, {"out": "f32", **DTYPES}, [{}, {}, {}], frozenset({"w"}))
    assert [t.name for t in program.tensors(Kind.WEIGHT)] == ["w.0", "w.1", "w.2"]
    assert [t.name for t in program.tensors(Kind.INPUT, Kind.OUTPUT)] == ["out", "a"]


def test_calls_in_place_follow_each_other() -> None:
    program = many_calls(LINEAR_RESIDUAL, SIZES, {"x": "f32", **DTYPES}, [{}, {}], frozenset({"w"}))
    rng = np.random.default_rng(0)
    x, a = rng.standard_normal((2, 3), np.float32), rng.standard_normal((2, 4), np.float32)
    weights = {f"w.{i}": rng.standard_normal((3, 4), np.float32) for i in range(2)}
    inputs = {"x" + STAGED: x, STAGED_ROWS: np.arange(2, dtype=np.int32), "a": a}
    (got,) = ReferenceExecutor(program, weights).run(inputs, SIZES).values()
    np.testing.assert_allclose(got, x + a @ weights["w.0"].T + a @ weights["w.1"].T, rtol=1e-5, atol=1e-5)
