"""A kernel that Triton has compiled ahead of time, launched without Triton's runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pegainfer.kernels.build import read_source
from pegainfer.kernels.triton.aot import compile_triton
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.launch import Launch, i32, ptr
from pegainfer.runtime.cuda.module import Module
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.support.triton import SOURCE

VARIANTS = read_source(SOURCE).variants


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_launch_gives_the_sums(name: str, pdl: bool, ctx: CudaContext, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'pegainfer[kernels]'")
    if pdl and ctx.device.info.capability < (9, 0):
        pytest.skip("launches overlap from compute capability 9.0 on")
    variant = compile_triton(SOURCE, name, VARIANTS[name], ctx.device.info.arch, tmp_path / "cubin")
    kernel = Module((tmp_path / "cubin").read_bytes(), ctx.device, name).kernel(name)
    # Small whole numbers: every sum is exact in float32, in whatever order.
    values = np.random.default_rng(1).integers(-8, 9, (37, 1000)).astype(np.float32)
    x = DeviceTensor.from_numpy(values, variant.features["dtype"], ctx.stream)
    out = DeviceTensor.from_numpy(np.full(37, np.nan, np.float32), "f32", ctx.stream)
    # Triton appends the addresses of two scratch buffers, which this kernel does not use.
    args = [ptr(out.address), ptr(x.address), i32(1000), ptr(None), ptr(None)]
    threads, shared = 32 * int(variant.features["warps"]), int(variant.features["shared"])
    Launch(kernel, (37, 1, 1), threads, args, shared=shared, pdl=pdl, label=name)(ctx.stream)
    np.testing.assert_array_equal(out.numpy(ctx.stream), values.sum(axis=1))
