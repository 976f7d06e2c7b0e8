"""Experts on the CPU: one token's result does not depend on the others, on threads, or on their faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.ops.compose import one_call
from pegainfer.ops.moe import MOE, ROUTE_EXPERTS
from pegainfer.ops.quantize import quantized_weight
from tests.cpu.kernels.harness import FORMATS, ISAS, SUPERBLOCKS

Array = np.ndarray[Any, Any]
SOFTMAX = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
N, K = 8, 3


def widths(dtype: str) -> tuple[int, int]:
    """M and F that whole blocks of a format fill."""
    return (256, 512) if dtype in SUPERBLOCKS else (64, 96)


class Block:
    """One block of experts with seeded weights, ready to run."""

    def __init__(self, options: CpuOptions, dtype: str, router: Array | None = None) -> None:
        rng = np.random.default_rng(4)
        m, f = widths(dtype)
        stacks = {"w_gate": (N, f, m), "w_up": (N, f, m), "w_down": (N, m, f)}
        w = {n: rng.standard_normal(s, np.float32) / np.float32(s[-1] ** 0.5) for n, s in stacks.items()}
        weights = {name: quantized_weight(dtype, values) for name, values in w.items()}
        chosen = rng.standard_normal((N, m), np.float32) if router is None else router
        weights["w_router"] = quantized_weight("f32", chosen)
        dtypes = {"out": "f32", "experts": "i32", "x": "f32", "norm": "f32"}
        dtypes |= {name: weight.dtype for name, weight in weights.items()}
        sizes = {"N": N, "K": K, "M": m, "F": f}
        self.backend = CpuBackend(weights, options)
        program = one_call(MOE, sizes, dtypes, {"eps": 1e-6, **SOFTMAX})
        self.executor = self.backend.prepare(program, {}, {"T": 200})

    def __call__(self, x: Array) -> dict[str, Array]:
        inputs = {"x": x, "norm": np.ones(x.shape[1], np.float32)}
        return {k: a.copy() for k, a in self.executor.run(inputs, {"T": len(x)}).items()}

    def close(self) -> None:
        self.backend.close()


def rows(count: int, dtype: str) -> Array:
    return np.random.default_rng(5).standard_normal((count, widths(dtype)[0]), np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["f32", "int8"])
@pytest.mark.parametrize("dtype", (*FORMATS, *SUPERBLOCKS))
def test_a_token_gives_the_same_bits_alone_and_in_any_company(dtype: str, activation: Any, isa: str) -> None:
    x = rows(150, dtype)
    together = Block(CpuOptions(threads=2, isa=isa, activation=activation), dtype)
    alone = Block(CpuOptions(threads=1, isa=isa, activation=activation), dtype)
    try:
        want = together(x)
        assert len(np.unique(want["experts"])) == N, "every expert is busy"
        for first, last in ((0, 1), (1, 2), (2, 5), (5, 70), (149, 150)):
            part = alone(x[first:last])
            for name, values in part.items():
                assert values.tobytes() == want[name][first:last].tobytes(), f"{name} of {first}:{last}"
        order = np.random.default_rng(6).permutation(len(x))
        assert together(x[order])["out"].tobytes() == want["out"][order].tobytes()
    finally:
        together.close()
        alone.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "activation"), [("q8_0", "int8"), ("q4_1", "f32"), ("bf16", "int8")])
def test_nan_in_one_row_harms_no_other(dtype: str, activation: Any, isa: str) -> None:
    x = rows(90, dtype)
    block = Block(CpuOptions(threads=2, isa=isa, activation=activation), dtype)
    try:
        want, bad = block(x), x.copy()
        bad[17], bad[40, 3], bad[71, 0] = np.nan, np.inf, np.nan
        got = block(bad)
    finally:
        block.close()
    spoilt = [17, 40, 71]
    others = np.setdiff1d(np.arange(len(x)), spoilt)
    assert np.isnan(got["out"][spoilt]).all()
    assert got["experts"][spoilt].tolist() == [[0, 1, 2]] * 3, "still experts, each once"
    for name in want:
        assert got[name][others].tobytes() == want[name][others].tobytes()


def test_all_tokens_to_the_same_experts() -> None:
    """A router of zeros ties all experts: every token meets the first K, the others get none."""
    x = rows(200, "q8_0")
    block = Block(CpuOptions(threads=2), "q8_0", np.zeros((N, x.shape[1]), np.float32))
    try:
        got = block(x)
        assert (got["experts"] == np.arange(K)).all()
        assert block(x[199:])["out"].tobytes() == got["out"][199:].tobytes()
    finally:
        block.close()


def test_groups_that_cannot_be_are_refused() -> None:
    sizes = {"T": 2, "N": 8, "K": 3}
    dtypes = {"experts": "i32", "gates": "f32", "logits": "f32"}
    for groups, kept in ((3, 1), (4, 1), (4, 5), (0, 0)):
        attrs = SOFTMAX | {"groups": groups, "kept_groups": kept}
        backend = CpuBackend({}, CpuOptions(threads=1))
        try:
            executor = backend.prepare(one_call(ROUTE_EXPERTS, sizes, dtypes, attrs), {}, sizes)
            with pytest.raises(OpError, match=f"got {kept} of {groups} groups"):
                executor.run({"logits": np.zeros((2, 8), np.float32)}, sizes)
        finally:
            backend.close()
