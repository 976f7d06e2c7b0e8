"""Paged attention at true sizes: long contexts in many parts, chunks, groups of every size, NaN around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse  # noqa: F401
from pegainfer.kernels.cuda.attention import AttentionProblem, choose_attention
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.compose import one_call
from tests.gpu.harness import rounded, run_once

Array = np.ndarray[Any, Any]
# (context, query tokens): one part, two parts, all parts; queries alone, in tiles, after long prefixes
ROWS = ((1, 1), (129, 1), (4096, 1), (9001, 1), (300, 300), (5000, 33), (2049, 2), (1030, 517), (0, 0))
BLOCK = 16


def case(rng: np.random.Generator, kv_heads: int, group: int, d: int, dtype: str) -> dict[str, Array]:
    """Arrays of one call; blocks in no order, NaN wherever no row may look."""
    counts = [-(-context // BLOCK) for context, _ in ROWS]
    ids = rng.permutation(sum(counts) + 2)
    table = np.full((len(ROWS), max(counts) + 1), ids[-1], np.int32)
    kv = np.full((len(ids), 1, 2, kv_heads, BLOCK, d), np.nan, np.float32)
    used = iter(ids)
    for row, (context, _) in enumerate(ROWS):
        for i in range(counts[row]):
            table[row, i] = block = next(used)
            held = min(BLOCK, context - i * BLOCK)
            kv[block, 0, :, :, :held] = rounded(rng.standard_normal((2, kv_heads, held, d)), dtype)
    lens = np.array([q for _, q in ROWS], np.int32)
    q = rounded(rng.standard_normal((int(lens.sum()), kv_heads * group, d)) * 2, dtype)
    return {
        "q": q, "kv": kv, "query_starts": (np.cumsum(lens) - lens).astype(np.int32), "query_lens": lens,
        "context_lens": np.array([c for c, _ in ROWS], np.int32), "block_table": table,
    }  # fmt: skip


def attend(a: dict[str, Array], scale: float) -> Array:
    """The same in float32, a row and a KV head at a time."""
    q, kv = a["q"], a["kv"][:, 0]
    out = np.zeros_like(q)
    group = q.shape[1] // kv.shape[2]
    for row, (context, count) in enumerate(ROWS):
        blocks = a["block_table"][row, : -(-context // BLOCK)]
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


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", [(2, 4, 128), (1, 8, 64), (3, 3, 64), (2, 1, 256), (1, 12, 128)], ids=str)
def test_long_rows(shape: tuple[int, int, int], dtype: str, ctx: CudaContext) -> None:
    kv_heads, group, d = shape
    arrays = case(np.random.default_rng(d + group), kv_heads, group, d, dtype)
    kv = arrays["kv"]
    sizes = {
        "T": len(arrays["q"]), "H": kv_heads * group, "D": d, "R": len(ROWS), "N": kv.shape[0], "Y": 1,
        "G": kv_heads, "S": BLOCK, "W": arrays["block_table"].shape[1],
    }  # fmt: skip
    dtypes = {k: "i32" for k in arrays} | {"q": dtype, "kv": dtype, "out": dtype}
    program = one_call(ATTENTION, sizes, dtypes, {"layer": 0, "scale": d**-0.5})
    inputs = {k: v for k, v in arrays.items() if k != "kv"}
    got = run_once(ctx, program, {}, {"kv": kv}, inputs, sizes)["out"]
    want = attend(arrays, d**-0.5)
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() < (1e-2 if dtype == "bf16" else 2e-3)


def test_the_choice_can_be_read(ctx: CudaContext) -> None:
    p = AttentionProblem(8, 8, 32, 8, 128, 16, 64, "bf16", True)
    choice = choose_attention(p, ctx.device.info)
    assert str(choice) == f"{choice.decode} in parts of 128 keys or more"
    assert ctx.library.variant(choice.decode) is not None
