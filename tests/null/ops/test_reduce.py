"""Reductions over ranks, and what they are on one."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.reference import ReferenceExecutor


def program(*, between: bool = False, again: bool = False) -> Program:
    """x += a · wᵀ by a partial result.

    Args:
        between: another op stands between the GEMM and its reduction.
        again: a norm reads the partial result afterwards.
    """
    b = Builder("reduce")
    a, w = b.input("a", "T", 3, dtype="f32"), b.weight("w", 2, 3, dtype="f32")
    gain = b.weight("gain", 2, dtype="f32")
    x, out, partial = b.output("x", "T", 2), b.output("out", "T", 2), b.buffer("partial", "T", 2)
    b.emit(LINEAR, out=x, a=a, w=w)
    b.emit(LINEAR, out=partial, a=a, w=w)
    if between:
        b.emit(RMS_NORM, {"eps": 1e-6}, out=out, x=x, weight=gain)
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    if again:
        b.emit(RMS_NORM, {"eps": 1e-6}, out=out, x=partial, weight=gain)
    return b.build()


def test_one_rank_adds_in_the_gemm() -> None:
    folded = program().on_one_rank()
    assert [c.spec.name for c in folded.calls] == ["linear", "linear_residual"]
    assert "partial" not in {t.name for t in folded.tensors()}
    assert folded.on_one_rank() == folded


@pytest.mark.parametrize("kept", ["between", "again"])
def test_a_partial_result_that_something_else_needs_stays(kept: str) -> None:
    recorded = program(**{kept: True})
    assert recorded.on_one_rank().calls == recorded.calls


def test_the_sum_is_added_to_the_stream() -> None:
    a, w = np.array([[1, 2, 3]], np.float32), np.array([[1, 0, 0], [0, 1, 1]], np.float32)
    executor = ReferenceExecutor(program(again=True), {"w": w, "gain": np.ones(2, np.float32)})
    found = executor.run({"a": a}, {"T": 1})
    np.testing.assert_array_equal(found["x"], [[2, 10]])
    np.testing.assert_allclose(found["out"], np.array([[1, 5]]) / np.sqrt(13), rtol=1e-6)
