"""FP8 weights on the GPU: which stay, which kernel runs, and where codes and scales lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import OpError
from pegainfer.kernels.build import find_sources
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.fp8 import TOKENS, Fp8Choice, stays_fp8
from pegainfer.lower.cuda.gemm import GemmProblem, choose_gemm
from pegainfer.lower.cuda.skinny import SkinnyChoice
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.weights.weight import Weight
from tests.support.fake_cuda import FakeCuda, fake_cuda, fake_kernels
from tests.support.packers import E4M3_POSITIVE

Array = np.ndarray[Any, Any]
H100 = DeviceInfo(0, "H100", (9, 0), 132, 50 << 20, 227 << 10, 228 << 10, 80 << 30, 13000)
HOPPER, ADA = Target(H100), Target(replace(H100, name="L40S", capability=(8, 9)))
KERNELS = {name for source in find_sources() for name in source.variants}
SHAPES = ((6144, 2560), (2560, 4096), (2560, 9728), (19_456, 2560), (24, 128))


def weight(n: int, k: int, form: str, name: str = "w") -> Tensor:
    return Tensor(name, (n, k), form, Kind.WEIGHT)


def test_weights_of_one_form_stay_in_fp8_on_hopper() -> None:
    rows, groups = weight(64, 256, "fp8_r128"), weight(64, 256, "fp8_g128")
    assert stays_fp8([rows, rows], "bf16", HOPPER) == "fp8_rows"
    assert stays_fp8([groups], "bf16", HOPPER) == "fp8_groups"
    expanded = ([rows, groups], [rows, weight(64, 256, "bf16")], [weight(64, 192, "fp8_r64")],
                [weight(60, 256, "fp8_r128")])  # fmt: skip
    assert [stays_fp8(w, "bf16", HOPPER) for w in expanded] == [""] * 4
    assert stays_fp8([rows], "f16", HOPPER) == stays_fp8([rows], "bf16", ADA) == ""


def test_choices_name_kernels_that_exist_and_fit() -> None:
    kinds = ("store", "residual", "swiglu", "storef32")
    for (n, k), m, out, weights in product(
        SHAPES, (1, 8, 17, 32, 33, 64, 65, 129, 4096), kinds, ("fp8_rows", "fp8_groups")
    ):
        choice = choose_gemm(GemmProblem(m, n, k, "bf16", out, weights=weights), HOPPER)
        assert choice.kernel in KERNELS and choice.shared <= H100.max_shared  # type: ignore[union-attr]
        if m <= 32 and (out != "residual" or n < 19_456):  # more than one tile a block adds to no residual
            assert isinstance(choice, SkinnyChoice) and choice.box == 128
        if isinstance(choice, SkinnyChoice):
            continue
        assert isinstance(choice, Fp8Choice) and choice.depth >= 3
        assert choice.tiles_m * TOKENS >= m and choice.tiles_n * choice.columns >= n
        assert 1 <= choice.splits <= k // 128
        assert choice.blocks <= min(132, choice.tiles_m * choice.tiles_n * choice.splits)


def test_few_tiles_split_k() -> None:
    few = choose_gemm(GemmProblem(100, 2560, 9728, "bf16", weights="fp8_rows"), HOPPER)
    many = choose_gemm(GemmProblem(4096, 6144, 2560, "bf16", weights="fp8_rows"), HOPPER)
    assert isinstance(few, Fp8Choice) and (few.columns, few.splits, few.blocks) == (64, 3, 120)
    assert few.sums == 4 * 3 * 40 * 128 * 64
    assert isinstance(many, Fp8Choice) and (many.columns, many.splits, many.sums) == (160, 1, 0)


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[CudaContext]:
    with fake_cuda(FakeCuda()):
        yield CudaContext(0, fake_kernels(tmp_path / "kernels"))


def stored(names: str, form: str, n: int = 24, k: int = 256) -> dict[str, tuple[Weight, Array]]:
    rng = np.random.default_rng(11)
    values = {name: rng.standard_normal((n, k)).astype(np.float32) for name in names}
    return {name: (quantized_weight(form, v), v) for name, v in values.items()}


@pytest.mark.parametrize("layout", ["rows", "pairs"])
@pytest.mark.parametrize("form", ["fp8_r128", "fp8_g128"])
def test_codes_and_scales_are_those_of_the_values(form: str, layout: str, ctx: CudaContext) -> None:
    found = stored("ab", form)
    store = WeightStore(ctx, {name: w for name, (w, _) in found.items()})
    tensors = weight(24, 256, form, "a"), weight(24, 256, form, "b")
    codes, scales = store.fp8(tensors, layout)
    assert store.fp8(tensors, layout) == (codes, scales)
    store.load()
    raw, factors = codes.numpy(ctx.stream), scales.numpy(ctx.stream)
    values = np.where(raw < 128, E4M3_POSITIVE[raw & 127], -E4M3_POSITIVE[raw & 127])
    values *= factors[:, None] if form == "fp8_r128" else np.repeat(factors.T, 128, 1)
    a, b = (w.values() for w, _ in found.values())
    want = np.concatenate([a, b]) if layout == "rows" else np.stack([a, b], 1).reshape(48, 256)
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize(
    ("layout", "other"), [("rows", (24, 384)), ("pairs", (32, 256)), ("pairs", (24, 384))], ids=str
)
def test_matrices_that_do_not_fit_each_other_are_refused(
    layout: str, other: tuple[int, int], ctx: CudaContext
) -> None:
    """The codes of the second would be written past the end of its rows, or of the memory of both."""
    a, b = stored("a", "fp8_r128")["a"][0], stored("b", "fp8_r128", *other)["b"][0]
    store = WeightStore(ctx, {"a": a, "b": b})
    tensors = weight(24, 256, "fp8_r128", "a"), weight(*other, "fp8_r128", "b")
    with pytest.raises(OpError, match=rf"do not fit into one \({layout}\)"):
        store.fp8(tensors, layout)
