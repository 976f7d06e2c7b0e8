"""Latent attention at true sizes: long contexts in many parts, chunks, any number of heads, NaN around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse  # noqa: F401
from pegainfer.lower.cuda.attention_choice import OWN_PARTS_ROWS, AttentionProblem
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.latent import ALONE_CHUNK, CHUNK, RANK, WIDTH, choose_latent
from pegainfer.ops.compose import one_call
from pegainfer.ops.mla import HEAD_LINEAR, LATENT_ATTENTION
from tests.gpu.harness import raw, rounded, run_once, sized

Array = np.ndarray[Any, Any]
Row = tuple[int, int]  # context, query tokens
SCALE = 0.1147  # DeepSeek-V2-Lite's
LIMIT = {"bf16": 1e-2, "f16": 2e-3}  # relative error of a head's output
# One part, two parts, all parts; queries alone, in tiles, after long prefixes; no row at all.
FEW: tuple[Row, ...] = ((1, 1), (129, 1), (700, 1), (70, 70), (700, 9), (300, 2), (0, 0))
ROWS: tuple[Row, ...] = sized(
    ((1, 1), (129, 1), (4096, 1), (9001, 1), (300, 300), (5000, 33), (2049, 2), (1030, 257), (0, 0)), FEW
)
# Where a decoded row gets more blocks, or more turns, and one beside it.
EDGES = sized(
    (16, 17, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8193),
    (16, 17, 63, 64, 65, 257),
)
HEADS = ((16, ROWS), (1, FEW), (5, FEW), (20, FEW), (128, FEW))


def case(
    rng: np.random.Generator, rows: tuple[Row, ...], heads: int, dtype: str, block: int = 16
) -> dict[str, Array]:
    """Arrays of one call; blocks in no order, NaN wherever no row may look."""
    counts = [-(-context // block) for context, _ in rows]
    ids = rng.permutation(sum(counts) + 2)
    table = np.full((len(rows), max(counts) + 1), ids[-1], np.int32)
    kv = np.full((len(ids), 1, block, WIDTH), np.nan, np.float32)
    used = iter(ids)
    for row, (context, _) in enumerate(rows):
        for i in range(counts[row]):
            table[row, i] = here = next(used)
            held = min(block, context - i * block)
            kv[here, 0, :held] = rounded(rng.standard_normal((held, WIDTH)), dtype)
    lens = np.array([q for _, q in rows], np.int32)
    q = rounded(rng.standard_normal((int(lens.sum()), heads, WIDTH)), dtype)
    return {
        "q": q, "kv": kv, "query_starts": (np.cumsum(lens) - lens).astype(np.int32), "query_lens": lens,
        "context_lens": np.array([c for c, _ in rows], np.int32), "block_table": table,
    }  # fmt: skip


def attend(a: dict[str, Array]) -> Array:
    """The same in float32, a row at a time."""
    q, kv = a["q"], a["kv"][:, 0]
    out = np.zeros((*q.shape[:2], RANK), np.float32)
    for row, (context, count) in enumerate(zip(a["context_lens"], a["query_lens"], strict=True)):
        keys = kv[a["block_table"][row, : -(-context // kv.shape[1])]].reshape(-1, WIDTH)[:context]
        first = a["query_starts"][row]
        sees = context - count + 1 + np.arange(count)
        hidden = np.arange(context)[None, :] >= sees[:, None]
        for head in range(q.shape[1] if count else 0):
            scores = q[first : first + count, head] @ keys.T * np.float32(SCALE)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[first : first + count, head] = weights @ keys[:, :RANK] / weights.sum(axis=1, keepdims=True)
    return out


def run(ctx: CudaContext, a: dict[str, Array], dtype: str) -> Array:
    """The GPU's output, twice the same bit by bit."""
    kv = a["kv"]
    sizes = {
        "T": len(a["q"]), "H": a["q"].shape[1], "D": WIDTH, "K": RANK, "R": len(a["query_lens"]),
        "N": kv.shape[0], "Y": 1, "S": kv.shape[2], "W": a["block_table"].shape[1],
    }  # fmt: skip
    dtypes = {k: "i32" for k in a} | {"q": dtype, "kv": dtype, "out": dtype}
    program = one_call(LATENT_ATTENTION, sizes, dtypes, {"layer": 0, "scale": SCALE})
    inputs = {k: v for k, v in a.items() if k != "kv"}
    return run_once(ctx, program, {}, {"kv": kv}, inputs, sizes)["out"]


def worst(got: Array, want: Array) -> float:
    """The largest relative error of a head's output; NaN if there is one."""
    return float((np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).max())


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("heads", "rows"), HEADS, ids=lambda v: v if isinstance(v, int) else len(v))
def test_long_rows(heads: int, rows: tuple[Row, ...], dtype: str, ctx: CudaContext) -> None:
    a = case(np.random.default_rng(heads), rows, heads, dtype)
    assert worst(run(ctx, a, dtype), attend(a)) < LIMIT[dtype]


@pytest.mark.parametrize("block", [32, 48, 256])
def test_blocks_of_every_size(block: int, ctx: CudaContext) -> None:
    a = case(np.random.default_rng(block), ROWS, 16, "bf16", block)
    assert worst(run(ctx, a, "bf16"), attend(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("heads", [16, 40])
def test_decoded_rows_of_every_length_together(heads: int, ctx: CudaContext) -> None:
    rng = np.random.default_rng(7)
    lengths = [*EDGES, *rng.integers(1, sized(400, 100), sized(60, 14)).tolist(), 0, 0]
    rng.shuffle(lengths)
    a = case(rng, tuple((n, min(n, 1)) for n in lengths), heads, "bf16")
    assert worst(run(ctx, a, "bf16"), attend(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("heads", [16, 6])
def test_chunks_at_every_edge_of_a_tile(heads: int, ctx: CudaContext) -> None:
    cached = (0, 1, 63, 64, sized(1500, 150))
    rows = tuple((before + count, count) for before in cached for count in sized((2, 3, 4, 5, 129), (3, 5)))
    a = case(np.random.default_rng(3), rows, heads, "bf16")
    assert worst(run(ctx, a, "bf16"), attend(a)) < LIMIT["bf16"]


def some(a: dict[str, Array], rows: list[int]) -> dict[str, Array]:
    """These rows of a call, which has one query token a row."""
    picked = {n: a[n][rows] for n in ("query_lens", "context_lens", "block_table", "q")}
    return a | picked | {"query_starts": np.arange(len(rows), dtype=np.int32)}


def test_a_decoded_row_has_the_same_bits_in_any_small_company(ctx: CudaContext) -> None:
    lengths = EDGES[-OWN_PARTS_ROWS:]
    together = case(np.random.default_rng(5), tuple((n, 1) for n in lengths), 16, "bf16")
    got = run(ctx, together, "bf16")
    for row in (0, len(lengths) // 2, len(lengths) - 1):
        pair = run(ctx, some(together, [row, 1]), "bf16")
        assert pair[0].tobytes() == got[row].tobytes(), lengths[row]


@pytest.mark.parametrize("lengths", sized([(1,), (64,), (65, 700), (9001, 16)], [(1,), (65, 300)]), ids=str)
def test_rows_cut_into_even_shares(lengths: tuple[int, ...], ctx: CudaContext) -> None:
    """Fewer keys than shares, one row across many of them, ends of shares within and between rows."""
    rows = tuple((n, 1) for n in (*lengths, *[33] * OWN_PARTS_ROWS))
    a = case(np.random.default_rng(8), rows, 16, "bf16")
    assert worst(run(ctx, a, "bf16"), attend(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("heads", [16, 40])
def test_a_nan_among_the_keys_reaches_the_rows_that_see_it(heads: int, ctx: CudaContext) -> None:
    """In a channel that is no value: a softmax that passes over the score would give a plausible answer."""
    a = case(np.random.default_rng(9), ((150, 1), (70, 20)), heads, "bf16")
    block, at = divmod(60, 16)
    for row in range(2):
        a["kv"][a["block_table"][row, block], 0, at, -1] = np.nan
    got = run(ctx, a, "bf16")
    want = np.array([True] * 11 + [True] * 10)
    want[1:11] = False  # tokens 50 to 59 of the second row do not see key 60
    assert np.isnan(got).all(axis=(1, 2)).tolist() == want.tolist()
    assert np.isnan(got).any(axis=(1, 2)).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 129, sized(1000, 130)])
@pytest.mark.parametrize(("n", "k", "more"), [(512, 128, 64), (128, 512, 0), (24, 72, 8)])
def test_a_matrix_for_each_head(n: int, k: int, more: int, tokens: int, dtype: str, ctx: CudaContext) -> None:
    heads = sized(16, 2)
    rng = np.random.default_rng(tokens)
    w = rounded(rng.standard_normal((heads, n, k)) * k**-0.5, dtype)
    a = rounded(rng.standard_normal((tokens, heads, k + more)), dtype)
    sizes = {"T": tokens, "H": heads, "A": n + more, "B": k + more, "N": n, "K": k}
    program = one_call(HEAD_LINEAR, sizes, {"a": dtype, "out": dtype, "w": dtype}, {})
    got = run_once(ctx, program, {"w": raw(w, dtype)}, {}, {"a": a}, sizes)["out"]
    want = np.einsum("thk,hnk->thn", a[..., :k], w)
    assert np.array_equal(got[..., n:], a[..., k:])
    assert worst(got[..., :n], want) < LIMIT[dtype]


def test_the_choice_can_be_read(ctx: CudaContext) -> None:
    p = AttentionProblem(8, 8, 16, 1, WIDTH, 16, 64, "bf16", True)
    choice = choose_latent(p, ctx.target, CHUNK, ALONE_CHUNK)
    assert str(choice).startswith(f"{choice.decode} in parts of {CHUNK} keys or more")
    assert ctx.library.variant(choice.decode) is not None
