"""Paged attention at true sizes: long contexts in many parts, chunks, groups of every size, NaN around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse  # noqa: F401
from pegainfer.lower.cuda.attention_choice import OWN_PARTS_ROWS, AttentionProblem, choose_attention
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.ops import float8
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.compose import one_call
from pegainfer.ops.stored import held
from tests.gpu.harness import rounded, run_once, sized

Array = np.ndarray[Any, Any]
Row = tuple[int, int]  # context, query tokens
# One part, two parts, all parts; queries alone, in tiles, after long prefixes; no row at all.
ROWS: tuple[Row, ...] = sized(
    ((1, 1), (129, 1), (4096, 1), (9001, 1), (300, 300), (5000, 33), (2049, 2), (1030, 517), (0, 0)),
    ((1, 1), (129, 1), (1300, 1), (200, 200), (700, 33), (300, 2), (0, 0)),
)
# Where a decoded row gets more blocks, or more turns, and one beside it.
EDGES = sized(
    (16, 17, 128, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 6145, 8193),
    (16, 17, 128, 255, 256, 257, 1025, 2048),
)
# Where a row alone gives a block no page, one or more, and where it is shared out to all blocks.
ALONE = sized((1, 17, 129, 513, 1024, 6144, 6145, 9001), (1, 17, 513, 6145))
WITH_BF16 = ["bf16", float8.E4M3]  # caches beside activations of bf16
CACHES = [*WITH_BF16, "f16"]
SHAPES = [(2, 4, 128), (1, 8, 64), (3, 3, 64), (2, 1, 256), (1, 12, 128)]  # KV heads, group, head size


def activation(dtype: str) -> str:
    """Of queries and outputs beside a cache of `dtype`."""
    return "bf16" if dtype == float8.E4M3 else dtype


def stored(values: Array, dtype: str) -> Array:
    """Float32 values that a cache of `dtype` holds exactly."""
    return float8.from_e4m3(float8.to_e4m3(values)) if dtype == float8.E4M3 else rounded(values, dtype)


def case(
    rng: np.random.Generator, rows: tuple[Row, ...], shape: tuple[int, int, int], dtype: str, block: int = 16
) -> dict[str, Array]:
    """Arrays of one call; blocks in no order, NaN wherever no row may look."""
    kv_heads, group, d = shape
    counts = [-(-context // block) for context, _ in rows]
    ids = rng.permutation(sum(counts) + 2)
    table = np.full((len(rows), max(counts) + 1), ids[-1], np.int32)
    kv = np.full((len(ids), 1, 2, kv_heads, block, d), np.nan, np.float32)
    used = iter(ids)
    for row, (context, _) in enumerate(rows):
        for i in range(counts[row]):
            table[row, i] = here = next(used)
            held = min(block, context - i * block)
            kv[here, 0, :, :, :held] = stored(rng.standard_normal((2, kv_heads, held, d)), dtype)
    lens = np.array([q for _, q in rows], np.int32)
    q = rounded(rng.standard_normal((int(lens.sum()), kv_heads * group, d)) * 2, activation(dtype))
    return {
        "q": q, "kv": kv, "query_starts": (np.cumsum(lens) - lens).astype(np.int32), "query_lens": lens,
        "context_lens": np.array([c for c, _ in rows], np.int32), "block_table": table,
    }  # fmt: skip


def attend(a: dict[str, Array], scale: float) -> Array:
    """The same in float32, a row and a KV head at a time."""
    q, kv = a["q"], a["kv"][:, 0]
    out = np.zeros_like(q)
    group, block = q.shape[1] // kv.shape[2], kv.shape[3]
    for row, (context, count) in enumerate(zip(a["context_lens"], a["query_lens"], strict=True)):
        blocks = a["block_table"][row, : -(-context // block)]
        pages = kv[blocks].transpose(1, 2, 0, 3, 4).reshape(2, kv.shape[2], -1, kv.shape[4])[:, :, :context]
        first = a["query_starts"][row]
        sees = context - count + 1 + np.arange(count)
        hidden = np.arange(context)[None, :] >= sees[:, None]
        for head in range(q.shape[1] if count else 0):
            keys, values = pages[:, head // group]
            scores = q[first : first + count, head] @ keys.T * np.float32(scale)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[first : first + count, head] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


def run(ctx: CudaContext, a: dict[str, Array], dtype: str) -> Array:
    """The GPU's output, twice the same bit by bit."""
    kv, d = a["kv"], a["q"].shape[2]
    sizes = {
        "T": len(a["q"]), "H": a["q"].shape[1], "D": d, "R": len(a["query_lens"]), "N": kv.shape[0], "Y": 1,
        "G": kv.shape[3], "S": kv.shape[4], "W": a["block_table"].shape[1],
    }  # fmt: skip
    outside = activation(dtype)
    dtypes = {k: "i32" for k in a} | {"q": outside, "kv": dtype, "out": outside}
    program = one_call(ATTENTION, sizes, dtypes, {"layer": 0, "scale": d**-0.5})
    inputs = {k: v for k, v in a.items() if k != "kv"}
    cache = held(kv, dtype) if dtype == float8.E4M3 else kv
    return run_once(ctx, program, {}, {"kv": cache}, inputs, sizes)["out"]


def worst(got: Array, want: Array) -> float:
    """The largest relative error of a head's output; NaN if there is one."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_long_rows(shape: tuple[int, int, int], dtype: str, ctx: CudaContext) -> None:
    a = case(np.random.default_rng(sum(shape[1:])), ROWS, shape, dtype)
    assert worst(run(ctx, a, dtype), attend(a, shape[2] ** -0.5)) < (2e-3 if dtype == "f16" else 1e-2)


@pytest.mark.parametrize("dtype", WITH_BF16)
@pytest.mark.parametrize("block", [32, 48, 256])
def test_blocks_of_every_size(block: int, dtype: str, ctx: CudaContext) -> None:
    a = case(np.random.default_rng(block), ROWS, (2, 4, 128), dtype, block)
    assert worst(run(ctx, a, dtype), attend(a, 128**-0.5)) < 1e-2


@pytest.mark.parametrize("dtype", WITH_BF16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoded_rows_of_every_length_together(
    shape: tuple[int, int, int], dtype: str, ctx: CudaContext
) -> None:
    rng = np.random.default_rng(7)
    lengths = [*EDGES, *rng.integers(1, 700, sized(120, 8)).tolist(), 0, 0]
    rng.shuffle(lengths)
    a = case(rng, tuple((n, min(n, 1)) for n in lengths), shape, dtype)
    assert worst(run(ctx, a, dtype), attend(a, shape[2] ** -0.5)) < 1e-2


@pytest.mark.parametrize("dtype", WITH_BF16)
def test_chunks_at_every_edge_of_a_tile(dtype: str, ctx: CudaContext) -> None:
    cached = (0, 1, 127, 128, sized(3000, 300))
    rows = tuple((before + count, count) for before in cached for count in (2, 31, 32, 33, 129))
    a = case(np.random.default_rng(3), rows, (2, 4, 128), dtype)
    assert worst(run(ctx, a, dtype), attend(a, 128**-0.5)) < 1e-2


def some(a: dict[str, Array], rows: list[int]) -> dict[str, Array]:
    """These rows of a call, which has one query token a row."""
    picked = {n: a[n][rows] for n in ("query_lens", "context_lens", "block_table", "q")}
    return a | picked | {"query_starts": np.arange(len(rows), dtype=np.int32)}


@pytest.mark.parametrize("dtype", WITH_BF16)
def test_a_decoded_row_has_the_same_bits_in_any_small_company(dtype: str, ctx: CudaContext) -> None:
    lengths = EDGES[-OWN_PARTS_ROWS:]
    together = case(np.random.default_rng(5), tuple((n, 1) for n in lengths), (2, 4, 128), dtype)
    got = run(ctx, together, dtype)
    for row in (0, len(lengths) // 2, len(lengths) - 1):
        pair = run(ctx, some(together, [row, 1]), dtype)
        assert pair[0].tobytes() == got[row].tobytes(), lengths[row]


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_alone(shape: tuple[int, int, int], dtype: str, ctx: CudaContext) -> None:
    together = case(np.random.default_rng(6), tuple((n, 1) for n in ALONE), shape, dtype)
    want = attend(together, shape[2] ** -0.5)
    for row, length in enumerate(ALONE):
        got = run(ctx, some(together, [row]), dtype)
        assert worst(got, want[row : row + 1]) < (2e-3 if dtype == "f16" else 1e-2), length


def test_a_row_alone_of_eight_kv_heads(ctx: CudaContext) -> None:
    """All blocks of the GPU have a part of it."""
    a = case(np.random.default_rng(9), ((9001, 1),), (8, 4, 128), "bf16")
    assert worst(run(ctx, a, "bf16"), attend(a, 128**-0.5)) < 1e-2


@pytest.mark.parametrize("lengths", [(1,), (64,), (65, 700), (9001, 16), (200,)], ids=str)
def test_rows_cut_into_even_shares(lengths: tuple[int, ...], ctx: CudaContext) -> None:
    """Fewer keys than shares, one row across many of them, ends of shares within and between rows."""
    rows = tuple((n, 1) for n in (*lengths, *[33] * OWN_PARTS_ROWS))
    a = case(np.random.default_rng(8), rows, (2, 4, 128), "bf16")
    assert worst(run(ctx, a, "bf16"), attend(a, 128**-0.5)) < 1e-2


def test_the_choice_can_be_read(ctx: CudaContext) -> None:
    p = AttentionProblem(8, 8, 32, 8, 128, 16, 64, "bf16", True)
    choice = choose_attention(p, ctx.target)
    assert str(choice).startswith(f"{choice.decode} in parts of 128 keys or more")
    assert ctx.library.variant(choice.decode) is not None
