"""Hostile inputs and error bounds of the parts of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from pegainfer.ops.cases.common import (
    LEAST,
    Flavour,
    U,
    denormal,
    equal,
    huge,
    i32,
    mixed_rows,
    normal,
    outliers,
    tiny,
    weights,
    zeros,
)
from pegainfer.ops.cases.fused import norm_error, norm_gain
from pegainfer.ops.cases.linear import Dot
from pegainfer.ops.cases.pointwise import rotation_positions, rotation_table
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
POSITIONS = 300


def stack(rng: np.random.Generator, heads: int, n: int, k: int) -> Array:
    """A matrix of each head: [H, N, K]."""
    return np.stack([weights(rng, n, k) for _ in range(heads)])


def head_linear_cases(rng: np.random.Generator) -> list[Case]:
    """Rows of every remainder, with and without copied channels; many tokens, none; DeepSeek's sizes."""
    # T, H, N, K, copied channels
    shapes: tuple[tuple[int, int, int, int, int, Flavour], ...] = (
        (1, 1, 1, 1, 0, normal),
        (0, 2, 16, 32, 8, normal),
        (3, 2, 33, 7, 5, normal),
        (1, 4, 512, 128, 64, normal),
        (2, 3, 128, 512, 0, normal),
        (5, 2, 24, 96, 8, outliers),
        (70, 2, 17, 64, 8, normal),
        (130, 1, 16, 256, 0, mixed_rows),
        (9, 5, 40, 256, 2, normal),
        (2, 2, 32, 32, 8, huge),
        (2, 2, 32, 32, 8, tiny),
        (2, 2, 13, 160, 4, denormal),
        (3, 2, 32, 64, 4, zeros),
    )
    return [
        Case(
            f"{t}x{h} heads, {k} to {n} and {more} copied, {flavour.__name__}",
            {"T": t, "H": h, "A": n + more, "B": k + more, "N": n, "K": k},
            {},
            {"a": flavour(rng, (t, h, k + more)), "w": stack(rng, h, n, k)},
        )
        for t, h, n, k, more, flavour in shapes
    ]


def head_products_error(a: Array, w: Array, dot: Dot) -> Array:
    """|error| of each head's product: [T, H, N] of a [T, H, K] and w [H, N, K]."""
    return np.stack([dot(a[:, h], w[h]) for h in range(len(w))], axis=1)


def head_linear_bound(dot: Dot) -> Callable[[Case], Arrays]:
    """That of the products; what is copied is exact."""

    def bound(case: Case) -> Arrays:
        a, w = case.arrays["a"], case.arrays["w"]
        out = np.zeros((*a.shape[:2], case.sizes["A"]))
        out[..., : w.shape[1]] = head_products_error(a[..., : w.shape[2]], w, dot)
        return {"out": out}

    return bound


def rope_tail_cases(rng: np.random.Generator) -> list[Case]:
    """Tails of every width up to the whole head; the first and the last position."""
    # T, H, D, B
    shapes: tuple[tuple[int, int, int, int, Flavour], ...] = (
        (1, 1, 2, 2, normal),
        (0, 2, 24, 8, normal),
        (3, 4, 24, 8, normal),
        (2, 2, 192, 64, normal),
        (70, 1, 80, 80, normal),
        (5, 3, 50, 18, mixed_rows),
        (2, 2, 24, 8, huge),
        (2, 2, 24, 8, tiny),
        (2, 2, 24, 8, zeros),
    )
    return [
        Case(
            f"{t}x{h}, the last {b} of {d}, {flavour.__name__}",
            {"T": t, "H": h, "D": d, "B": b, "P": POSITIONS},
            {},
            {
                "x": flavour(rng, (t, h, d)),
                "positions": i32(rotation_positions(rng, t, POSITIONS)),
                "cos_sin": rotation_table(POSITIONS, b, 1e4),
            },
        )
        for t, h, d, b, flavour in shapes
    ]


def rotation_error(x: Array, error: Array | float = 0.0) -> Array:
    """|error| of rotated halves in float32 of x, which errs by `error`: 3 U of terms that may cancel."""
    each = sum(np.split(error + 3 * U * np.abs(x.astype(np.float64)), 2, axis=-1)) + 2 * LEAST
    return np.concatenate([each, each], axis=-1)


def rope_tail_bound(case: Case) -> Arrays:
    x, kept = case.arrays["x"], case.sizes["D"] - case.sizes["B"]
    return {"x": np.concatenate([np.zeros((*x.shape[:2], kept)), rotation_error(x[..., kept:])], axis=-1)}


def latent_append_cases(rng: np.random.Generator) -> list[Case]:
    """Slots in no order, the pool's first and last; latents of every flavour; NaN elsewhere in the pool."""
    # T, K, B, S
    shapes: tuple[tuple[int, int, int, int, Flavour], ...] = (
        (1, 32, 8, 16, normal),
        (5, 512, 64, 16, normal),
        (40, 48, 16, 16, mixed_rows),
        (17, 32, 8, 32, outliers),
        (3, 33, 2, 16, normal),
        (3, 32, 8, 16, zeros),
        (3, 32, 8, 16, tiny),
    )
    cases = []
    for t, k, b, s, flavour in shapes:
        n, y = -(-t // s) + 2, 3
        slots = rng.permutation(n * s)[:t]
        slots[slots == 0], slots[slots == n * s - 1] = slots[0], slots[-1]
        slots[0], slots[-1] = 0, (n * s - 1 if t > 1 else 0)
        arrays = {
            "kv": np.full((n, y, s, k + b), np.nan, np.float32),
            "latent": flavour(rng, (t, k + b)),
            "norm": norm_gain(rng, k),
            "positions": i32(rotation_positions(rng, t, POSITIONS)),
            "slots": i32(slots),
            "cos_sin": rotation_table(POSITIONS, b, 1e4),
        }
        sizes = {"T": t, "N": n, "Y": y, "S": s, "D": k + b, "K": k, "B": b, "P": POSITIONS}
        attrs = {"layer": int(rng.integers(y)), "eps": 1e-6}
        cases.append(Case(f"{t} tokens of {k} and {b}, {flavour.__name__}", sizes, attrs, arrays))
    return cases


def row_error(latent: Array, norm: Array, eps: float, error: Array | float = 0.0) -> Array:
    """|error| of a cached row, [T, D], of products that err by `error`."""
    rank, given = len(norm), error + np.zeros(latent.shape)
    normed = norm_error(latent[:, :rank], norm, eps, given[:, :rank])[1]
    return np.concatenate([normed, rotation_error(latent[:, rank:], given[:, rank:])], axis=1)


def in_cache(case: Case, rows: Array) -> Array:
    """Errors of rows [T, D] at their places in the cache."""
    pool = np.zeros(case.arrays["kv"].shape)
    block, offset = np.divmod(case.arrays["slots"], case.sizes["S"])
    pool[block, case.attrs["layer"], offset] = rows
    return pool


def latent_append_bound(case: Case) -> Arrays:
    a = case.arrays
    return {"kv": in_cache(case, row_error(a["latent"], a["norm"], case.attrs["eps"]))}


class Batch(msgspec.Struct, frozen=True):
    """Rows as (context length, query length), the heads that look at them, and what they look at."""

    label: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 32
    rotated: int = 8
    block_size: int = 16
    q: Flavour = normal
    c: Flavour = normal
    q_size: float = 1.0


def _with_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal, but for a NaN in the last row's last channel, which is no value: a softmax that passes over the
    score gives a plausible answer.
    """
    values = normal(rng, shape)
    values[..., -1, -1] = np.nan
    return values


BATCHES = (
    Batch("decode of a first token", ((1, 1),)),
    Batch("decode below, at and past a block's end", ((15, 1), (16, 1), (17, 1), (32, 1), (33, 1))),
    Batch("decode over a long context", ((1100, 1), (3, 1)), heads=2),
    Batch("DeepSeek's sizes", ((37, 3), (130, 1)), heads=16, rank=512, rotated=64),
    Batch("many heads", ((18, 2), (40, 1)), heads=50, rank=64, rotated=16),
    Batch("prefill, chunks and decodes together", ((1, 1), (16, 16), (17, 1), (50, 3), (33, 33), (100, 1))),
    Batch("many rows", tuple((1 + 7 * i % 45, 1) for i in range(70)), heads=1),
    Batch("rows of no whole vector", ((41, 41),), heads=3, rank=48, rotated=2),
    Batch("blocks of 32", ((31, 1), (33, 33), (65, 2)), block_size=32),
    Batch("scores far apart: one key takes all", ((40, 3), (17, 1)), q_size=100.0),
    Batch("equal scores", ((40, 3), (17, 1)), c=equal),
    Batch("queries of zero", ((40, 3), (17, 1)), q=zeros),
    Batch("tiny keys", ((40, 3), (17, 1)), c=tiny),
    Batch("denormal rows", ((40, 3), (17, 1)), c=denormal),
    Batch("NaN among the rows", ((40, 3), (17, 1), (129, 1), (30, 30)), c=_with_nan),
    Batch("queries of NaN", ((40, 3), (17, 1)), q=_with_nan),
)


def latent_attention_cases(rng: np.random.Generator) -> list[Case]:
    """As attention's: contexts around a block's end, blocks and rows in no order, NaN where nobody looks."""
    cases = []
    for b in BATCHES:
        sizes, arrays, layer = batch_inputs(rng, b)
        sizes["K"] = b.rank
        arrays["q"] = b.q(rng, (sizes["T"], b.heads, sizes["D"])) * np.float32(b.q_size)
        cases.append(Case(b.label, sizes, {"layer": layer, "scale": sizes["D"] ** -0.5}, arrays))
    return cases


def batch_inputs(rng: np.random.Generator, b: Batch) -> tuple[dict[str, int], Arrays, int]:
    """Sizes, a cache with everything that says where its rows lie, and the layer."""
    layers, rows, width = 2, len(b.rows), b.rank + b.rotated
    layer = int(rng.integers(layers))
    needed = [-(-context // b.block_size) for context, _ in b.rows]
    ids = rng.permutation(sum(needed) + 3)
    table = np.full((rows, max(needed) + 2), ids[-1], np.int32)
    kv = np.full((len(ids), layers, b.block_size, width), np.nan, np.float32)
    used = iter(ids)
    for row, (context, _) in enumerate(b.rows):
        for i in range(needed[row]):
            block = table[row, i] = next(used)
            held = min(b.block_size, context - i * b.block_size)
            kv[block, layer, :held] = b.c(rng, (held, width))
    lens = np.array([count for _, count in b.rows])
    order = rng.permutation(rows)  # where a row's tokens lie says nothing about its number
    starts = np.zeros(rows, int)
    starts[order] = np.cumsum(lens[order]) - lens[order]
    sizes = {"T": int(lens.sum()), "H": b.heads, "D": width, "R": rows, "W": table.shape[1]}
    sizes |= {"N": len(ids), "Y": layers, "S": b.block_size}
    sizes |= {"C": sum(c for c, _ in b.rows), "Q": sum(q * c - q * (q - 1) // 2 for c, q in b.rows)}
    arrays = {
        "kv": kv,
        "query_starts": i32(starts),
        "query_lens": i32(lens),
        "context_lens": i32([c for c, _ in b.rows]),
        "block_table": table,
    }
    return sizes, arrays, layer


def attended(
    case: Case, q: Array, error: Array | float, rank: int, w_v: Array | None = None
) -> tuple[Array, Array, Array]:
    """The attended latents of queries that err by `error`: [T, H, K]; what goes wrong with them.

    Weights err by their scores: a dot product of D in float32, then exp. That moves a head's values, which
    are the latents or their products with w_v [H, A, K], by the same share of Σ p |value|: [T, H, A] is the
    second result. The third, [T, H, K], is the rounding of the weighted sum itself.
    """
    arrays, scale = case.arrays, case.attrs["scale"]
    kv = arrays["kv"][:, case.attrs["layer"]]
    given, q64 = error + np.zeros(q.shape), q.astype(np.float64)
    want, rounded = np.zeros((*q.shape[:2], rank)), np.zeros((*q.shape[:2], rank))
    moved = np.zeros((*q.shape[:2], rank if w_v is None else w_v.shape[1]))
    for row, context in enumerate(arrays["context_lens"]):
        blocks = arrays["block_table"][row, : -(-int(context) // kv.shape[1])]
        keys = kv[blocks].reshape(-1, kv.shape[2])[:context].astype(np.float64)
        latents = keys[None, :, :rank]
        sizes = np.abs(latents if w_v is None else np.einsum("sk,hak->hsa", latents[0], w_v))
        first, count = arrays["query_starts"][row], arrays["query_lens"][row]
        for t in range(first, first + count):
            c = keys[: context - (first + count - 1 - t)]
            scores = q64[t] @ c.T * scale
            own = 2 * (q.shape[2] / 4 + 8) * U * (np.abs(q64[t]) @ np.abs(c).T).max(axis=1)
            share = (own + 2 * (given[t] @ np.abs(c).T).max(axis=1)) * scale + 32 * U
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            values = np.abs(c[:, :rank])
            want[t] = p @ c[:, :rank]
            moved[t] = share[:, None] * (p[:, None] @ sizes[:, : len(c)])[:, 0]
            rounded[t] = (len(c) / 8) * U * (p @ values) + 2 * LEAST * (1 + values.sum(axis=0))
    return want, moved, rounded


def latent_attention_bound(case: Case) -> Arrays:
    _, moved, rounded = attended(case, case.arrays["q"], 0.0, case.sizes["K"])
    return {"out": moved + rounded}
