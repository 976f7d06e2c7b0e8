"""Latent attention with the heads' matrices: rows of many query tokens over expanded latents at every edge of
a tile, behind prefixes, in rounds and where room ends; decoded rows in any number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse  # noqa: F401
from pegainfer.lower.cuda import mla_expanded
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.latent import RANK, WIDTH
from pegainfer.lower.cuda.mla_expanded import CHANNELS, ROTATED, TILE, key_bytes
from pegainfer.ops.compose import one_call
from pegainfer.ops.mla import MLA_ATTENTION
from tests.gpu.harness import raw, rounded, run_once, sized
from tests.gpu.kernels.test_mla import SCALE, Row, case, worst

Array = np.ndarray[Any, Any]
DECODED = (1, 2, 5, 8, 9, 16, 17, 40, sized(130, 20))  # rows; few are cut by their own length
HEAD = CHANNELS + ROTATED
LIMIT = {"bf16": 1.5e-2, "f16": 3e-3}  # relative error of a head's output
FEW: tuple[Row, ...] = ((64, 64), (129, 129), (1, 1), (300, 100), (70, 9))
# Whole tiles of queries and keys and one more or less, prefixes, decoded rows and short chunks beside them.
ROWS: tuple[Row, ...] = sized(
    (
        (64, 64), (65, 65), (127, 127), (128, 128), (129, 129), (300, 300), (1, 1), (700, 9), (129, 1),
        (1000, 128), (1025, 129), (2049, 255), (5000, 257), (0, 0), (640, 64), (4097, 1),
    ),
    FEW,
)  # fmt: skip


def layer_case(rows: tuple[Row, ...], heads: int, dtype: str, block: int = 16) -> dict[str, Array]:
    """Arrays of one call: those of attention over absorbed queries, with queries and matrices of heads."""
    rng = np.random.default_rng(len(rows) + heads)
    a = case(rng, rows, heads, dtype, block)
    a["q"] = rounded(rng.standard_normal((len(a["q"]), heads, HEAD)), dtype)
    a["w_k"] = rounded(rng.standard_normal((heads, RANK, CHANNELS)) * RANK**-0.5, dtype)
    a["w_v"] = rounded(rng.standard_normal((heads, CHANNELS, RANK)) * RANK**-0.5, dtype)
    return a


def attended(a: dict[str, Array]) -> Array:
    """The call in float32, a row and head at a time, with absorbed queries: quickest for few query tokens."""
    q, kv = a["q"], a["kv"][:, 0]
    out = np.zeros((*q.shape[:2], CHANNELS), np.float32)
    for row, (context, count) in enumerate(zip(a["context_lens"], a["query_lens"], strict=True)):
        if not count:
            continue
        keys = kv[a["block_table"][row, : -(-context // kv.shape[1])]].reshape(-1, WIDTH)[:context]
        mine = slice(a["query_starts"][row], a["query_starts"][row] + count)
        hidden = np.arange(context)[None, :] >= context - count + 1 + np.arange(count)[:, None]
        for head in range(q.shape[1]):
            plain, turned = q[mine, head, :CHANNELS], q[mine, head, CHANNELS:]
            absorbed = np.concatenate([plain @ a["w_k"][head].T, turned], axis=1)
            scores = absorbed @ keys.T * np.float32(SCALE)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[mine, head] = weights @ keys[:, :RANK] @ a["w_v"][head].T
    return out


def run(ctx: CudaContext, a: dict[str, Array], dtype: str) -> Array:
    """The GPU's output, twice the same bit by bit."""
    kv = a["kv"]
    sizes = {
        "T": len(a["q"]), "H": a["q"].shape[1], "A": CHANNELS, "F": HEAD, "X": CHANNELS, "D": WIDTH,
        "K": RANK, "R": len(a["query_lens"]), "N": kv.shape[0], "Y": 1, "S": kv.shape[2],
        "W": a["block_table"].shape[1],
    }  # fmt: skip
    dtypes = {k: "i32" for k in a} | {k: dtype for k in ("q", "kv", "out", "w_k", "w_v")}
    program = one_call(MLA_ATTENTION, sizes, dtypes, {"layer": 0, "scale": SCALE})
    inputs = {k: v for k, v in a.items() if k not in ("kv", "w_k", "w_v")}
    weights = {k: raw(a[k], dtype) for k in ("w_k", "w_v")}
    return run_once(ctx, program, weights, {"kv": kv}, inputs, sizes)["out"]


@pytest.mark.parametrize(("heads", "dtype"), [(16, "bf16"), (2, "f16"), (1, "bf16"), (5, "bf16")])
def test_rows_of_every_length_together(heads: int, dtype: str, ctx: CudaContext) -> None:
    a = layer_case(ROWS if heads < 5 else FEW, heads, dtype)
    assert worst(run(ctx, a, dtype), attended(a)) < LIMIT[dtype]


@pytest.mark.parametrize("rows", DECODED)
@pytest.mark.parametrize(("heads", "dtype"), [(16, "bf16"), (3, "f16")])
def test_decoded_rows(rows: int, heads: int, dtype: str, ctx: CudaContext) -> None:
    """Whole rows, rows in parts, and rows without tokens."""
    lengths = np.random.default_rng(rows).integers(1, sized(1500, 300) if rows < 40 else 300, rows)
    lengths[rows // 2] = sized(3001, 700)
    lengths[rows // 3] = 0 if rows > 3 else 33
    a = layer_case(tuple((int(n), min(int(n), 1)) for n in lengths), heads, dtype)
    assert worst(run(ctx, a, dtype), attended(a)) < LIMIT[dtype]


@pytest.mark.parametrize("block", [32, 48, 256])
def test_blocks_of_every_size(block: int, ctx: CudaContext) -> None:
    a = layer_case(ROWS, 2, "bf16", block)
    assert worst(run(ctx, a, "bf16"), attended(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("context", sized([300, 1100, 9001], [300, 1100]))
def test_a_chunk_behind_a_prefix_is_cut_into_parts(context: int, ctx: CudaContext) -> None:
    a = layer_case(((context, 260),), 4, "bf16")
    assert worst(run(ctx, a, "bf16"), attended(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("tiles", [2, 3, 7])
def test_keys_in_several_rounds(tiles: int, ctx: CudaContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that span rounds, that begin a new one, and that find no room any more."""
    heads = 2
    monkeypatch.setattr(mla_expanded, "SCRATCH_BYTES", tiles * TILE * key_bytes(heads))
    rows: tuple[Row, ...] = ((500, 150), (200, 200), (1, 1), (700, 650), (140, 70), (900, 64), (130, 130))
    a = layer_case(rows, heads, "bf16")
    assert worst(run(ctx, a, "bf16"), attended(a)) < LIMIT["bf16"]


@pytest.mark.parametrize("head", [0, 3])
def test_a_nan_among_the_keys_reaches_the_rows_that_see_it(head: int, ctx: CudaContext) -> None:
    """In a channel that all heads share."""
    a = layer_case(((400, 300), (290, 270)), 4, "bf16")
    block, at = divmod(350, 16)
    a["kv"][a["block_table"][0, block], 0, at, -1] = np.nan
    got = np.isnan(run(ctx, a, "bf16"))[:, head]
    assert got[250:300].all()  # tokens of the first row from key 350 on
    assert not got[:250].any() and not got[300:].any()
