"""The portable product in Triton, by itself: every ending, rows and columns off the tiles, parts of k."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.tiled import TiledChoice, launch_tiled, tiled_choice
from pegainfer.runtime.cuda.tensor import DeviceTensor
from tests.gpu.harness import POISON, rounded, sized

Array = np.ndarray[Any, Any]
SHAPES = sized(  # m, n, k
    ((17, 576, 1536), (33, 200, 528), (64, 2560, 4096), (100, 130, 9728), (128, 2562, 80)),
    ((17, 130, 1040), (33, 64, 528), (128, 66, 80)),
)
SPLITS = (1, 3, 8)
ROUNDED = 3e-3  # relative: half a step of bf16 (2**-9) at most, less on the average
# Float32 sums on tensor cores err by up to 2**-23 of the partial sum an addition (they cut off rather than
# round); of k random terms partial sums and their errors both grow as sqrt(k), so the whole is off by some
# sqrt(k) · 2**-23 of itself, and by half as much again where cut ends add up with one sign.
SUMMED = 1.5 * 2**-23


def run(ctx: CudaContext, choice: TiledChoice, x: Array, w: Array, out: Array, dtype: str) -> Array:
    """Twice from the same start; both results must be equal bit by bit."""
    m, k = x.shape
    held = [DeviceTensor.from_numpy(a, "bf16", ctx.stream) for a in (x, w)]
    partial = DeviceTensor.empty((choice.splits, m, len(w)), "f32")
    results = []
    for _ in range(2):
        target = DeviceTensor.from_numpy(out, dtype, ctx.stream)
        ctx.stream.fill(partial.address, POISON, partial.nbytes)
        sizes = m, len(w), k
        launch_tiled(
            ctx.library, choice, target.address, *(t.address for t in held), partial.address,
            ctx.arrivals.address, sizes, pdl=False,
        )(ctx.stream)  # fmt: skip
        results.append(target.numpy(ctx.stream))
    assert results[0].tobytes() == results[1].tobytes()
    arrivals = DeviceTensor.at(ctx.arrivals.address, (choice.tiles,), "i32").numpy(ctx.stream)
    assert not arrivals.any()
    return results[0]


@pytest.mark.parametrize("kind", ["store", "storef32", "residual", "swiglu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(kind: str, shape: tuple[int, int, int], ctx: CudaContext) -> None:
    m, n, k = shape
    rng = np.random.default_rng(n)
    x = rounded(rng.standard_normal((m, k), np.float32), "bf16")
    w = rounded(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), "bf16")
    full = x.astype(np.float64) @ w.T.astype(np.float64)
    before = np.full((m, n // 2 if kind == "swiglu" else n), np.nan, np.float32)
    if kind == "residual":
        before = rounded(rng.standard_normal((m, n), np.float32), "bf16")
        full = full + before
    if kind == "swiglu":
        gate, up = full[:, ::2], full[:, 1::2]
        full = gate / (1 + np.exp(-gate)) * up
    dtype = "f32" if kind == "storef32" else "bf16"
    for splits in SPLITS:
        choice = tiled_choice("bf16", kind, m, n, k, ctx.device.info, splits=splits)
        assert choice is not None
        got = run(ctx, choice, x, w, before, dtype)
        error = np.linalg.norm(got - full) / np.linalg.norm(full)
        assert error < (SUMMED * k**0.5 if kind == "storef32" else ROUNDED), f"{splits} splits"
