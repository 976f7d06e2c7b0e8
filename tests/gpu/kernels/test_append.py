"""Attention that finishes the projected heads and appends the token itself: the bits of launches apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.ops.float8 import E4M3, to_e4m3
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor, encode
from tests.gpu.harness import EAGER, poison, raw, rounded, sized
from tests.support.heads import Heads, heads_program

Array = np.ndarray[Any, Any]
# Pages begun and ended, blocks of a cluster that join in, rows that all blocks share.
CONTEXTS = sized(
    (
        1,
        2,
        15,
        16,
        17,
        32,
        33,
        255,
        256,
        257,
        511,
        512,
        513,
        1023,
        1024,
        1025,
        4095,
        4096,
        4097,
        6160,
        16_384,
    ),
    (1, 16, 17, 257, 513, 4097),
)
SHAPES = [
    Heads(8, 4, 128, norms=True),
    Heads(2, 4, 128),
    Heads(1, 8, 64),
    Heads(3, 5, 64, norms=True),
    Heads(2, 1, 256, norms=True),
    Heads(1, 12, 128, norms=True),
    Heads(1, 16, 128),
    Heads(7, 2, 64),  # a unit's blocks are not whole clusters
    Heads(40, 1, 64),  # more units than a row alone takes to all SMs
    Heads(2, 4, 128, "f16", norms=True),
    Heads(1, 8, 64, "f16"),
    Heads(1, 4, 256, "f16"),
    Heads(4, 4, 256, norms=True, gated=True),
    Heads(2, 2, 64, "f16", gated=True),
    Heads(8, 4, 128, norms=True, cached=E4M3),
    Heads(1, 12, 128, cached=E4M3),
    Heads(3, 5, 64, norms=True, cached=E4M3),
    Heads(4, 4, 256, norms=True, gated=True, cached=E4M3),
]


class Case:
    """One shape's program, and rows whose blocks lie in no order in a cache of NaN."""

    def __init__(
        self, ctx: CudaContext, h: Heads, seed: int, rows: int = 1, longest: int = CONTEXTS[-1]
    ) -> None:
        self.ctx, self.rng = ctx, np.random.default_rng(seed)
        width = -(-longest // h.block_size)
        self.h = h = replace(h, hidden=256, layers=1, width=width, blocks=rows * width + 1)
        group = h.kv_heads * h.head_dim
        weights = {
            name: raw(self.rng.standard_normal((count, h.hidden)) / 16, h.dtype)
            for name, count in (
                ("wq", group * h.group),
                ("wk", group),
                ("wv", group),
                ("wg", group * h.group),
            )
            if name != "wg" or h.gated
        }
        backend = CudaBackend(ctx, weights, EAGER)
        self.kv = DeviceTensor.empty(h.cache, h.cached or h.dtype, "kv")
        largest = {"T": rows, "R": rows}
        self.executor: CudaExecutor = backend.prepare(heads_program(h), {"kv": self.kv}, largest)
        backend.load()
        freqs = inverse_frequencies(h.head_dim, 1e4, None)
        self.constants = {
            "norm": 1 + self.rng.standard_normal(h.hidden).astype(np.float32) / 8,
            "cos_sin": cos_sin_table(width * h.block_size, freqs),
        }
        if h.norms:
            for name in ("q_norm", "k_norm"):
                self.constants[name] = 1 + self.rng.standard_normal(h.head_dim).astype(np.float32) / 8
        # All that rows may hold; a step is given as much of it as it has keys, less the one that it appends.
        self.tokens = self.rng.standard_normal((longest, 2, h.kv_heads, h.head_dim)).astype(np.float32)
        if h.cached:
            self.tokens = to_e4m3(self.tokens)
        else:
            self.tokens = encode(rounded(self.tokens, h.dtype), h.dtype)

    def inputs(self, contexts: list[int]) -> tuple[dict[str, Array], dict[str, int], Array]:
        """Inputs, sizes and the cache before the step; a context of 0 is a row of padding."""
        h, rows, i32 = self.h, len(contexts), np.int32
        ids = self.rng.permutation(h.blocks)[: rows * h.width].reshape(rows, h.width).astype(i32)
        positions = np.array([max(0, n - 1) for n in contexts], i32)
        slots = ids[np.arange(rows), positions // h.block_size] * h.block_size + positions % h.block_size
        cache = np.full(self.kv.nbytes, 0xFF, np.uint8).view(self.tokens.dtype).reshape(h.cache)
        for row, context in enumerate(contexts):
            for first in range(0, context - 1, h.block_size):
                held = self.tokens[first : min(first + h.block_size, context - 1)]
                cache[ids[row, first // h.block_size], 0, :, :, : len(held)] = held.transpose(1, 2, 0, 3)
        lens = np.array([min(1, n) for n in contexts], i32)
        x = rounded(self.rng.standard_normal((rows, h.hidden)), h.dtype)
        return (
            {
                "x": encode(x, h.dtype), **self.constants, "positions": positions,
                "slots": np.where(lens > 0, slots, -1).astype(i32),
                "query_starts": np.where(lens > 0, np.arange(rows), 0).astype(i32), "query_lens": lens,
                "context_lens": np.array(contexts, i32), "block_table": ids,
            },
            {"T": rows, "R": rows},
            cache,
        )  # fmt: skip

    def run(
        self, given: dict[str, Array], env: dict[str, int], cache: Array, apart: bool
    ) -> tuple[Array, Array]:
        """The output and the cache's bits."""
        poison(self.ctx, self.executor)
        self.ctx.stream.upload(self.kv.address, cache.ctypes.data, cache.nbytes, "cache")
        if apart:
            for _, _, run in self.executor.walk(given, env):
                run()
        else:
            self.executor.run(given, env)
        out = self.executor.output("out", env).numpy(self.ctx.stream)
        after = np.empty_like(cache)
        self.ctx.stream.download(after.ctypes.data, self.kv.address, after.nbytes, "cache")
        self.ctx.stream.synchronize("cache")
        return out, after

    def check(self, contexts: list[int]) -> None:
        given, env, cache = self.inputs(contexts)
        real = np.array(contexts) > 0
        want, kept = self.run(given, env, cache, apart=True)
        got, after = self.run(given, env, cache, apart=False)
        assert np.isfinite(want[real]).all(), contexts
        assert got[real].tobytes() == want[real].tobytes(), contexts
        assert after.tobytes() == kept.tobytes() != cache.tobytes(), contexts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_row_has_the_bits_of_launches_apart(shape: Heads, ctx: CudaContext) -> None:
    longest = CONTEXTS[-1] if shape.kv_heads <= 3 else 1025 if shape.kv_heads > 8 else 6160
    case = Case(ctx, shape, seed=shape.kv_heads, longest=longest)
    for context in (n for n in CONTEXTS if n <= longest):
        case.check([context])


ROWS = (
    [17, 1025],
    [1, 16, 0, 700],
    [*range(1, 900, 150), 0, 4097],
    [*range(3, 1200, 48), 4097, 0, 1, 0],  # in even shares
    [*range(1, 126), 0, 17, 300],  # the same, as many rows as may be
)


@pytest.mark.parametrize("contexts", ROWS, ids=len)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[8], *SHAPES[-4:-1]], ids=str)
def test_rows_together_have_the_bits_of_launches_apart(
    shape: Heads, contexts: list[int], ctx: CudaContext
) -> None:
    case = Case(ctx, shape, len(contexts), rows=len(contexts), longest=max(contexts))
    case.check(contexts)
    case.check(contexts[::-1])


@pytest.mark.parametrize("block_size", [32, 64, 256])
def test_blocks_of_every_size(block_size: int, ctx: CudaContext) -> None:
    case = Case(ctx, Heads(2, 4, 128, norms=True, block_size=block_size), block_size, longest=1280)
    for context in (1, 16, 17, block_size, block_size + 1, 1025, 1280):
        case.check([context])


def test_padding_appends_nothing(ctx: CudaContext) -> None:
    case = Case(ctx, Heads(2, 4, 128, norms=True), 1, longest=64)
    given, env, cache = case.inputs([0])
    _, after = case.run(given, env, cache, apart=False)
    assert after.tobytes() == cache.tobytes()


@pytest.mark.parametrize(("rows", "kernel"), [(1, "row_bf16"), (8, "bf16"), (17, "bf16")])
def test_a_step_is_one_launch_less(rows: int, kernel: str, ctx: CudaContext) -> None:
    if ctx.device.info.arch != "90a":
        pytest.skip("only Hopper's steps append in attention")
    case = Case(ctx, Heads(2, 4, 128), 2, rows=rows, longest=64)
    launches = [w for _, work in case.executor.work({"T": rows, "R": rows}, True) for w in work]
    names = [w.kernel.name for w in launches if isinstance(w, Launch)]
    assert f"attention_decode_append_{kernel}_d128" in names
    assert not any(n.startswith("norm_rope_append") for n in names)
