"""Hostile inputs and error bounds of the paged KV cache: appending to it and attending over it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from pegainfer.ops.cases.common import LEAST, Flavour, U, denormal, equal, huge, i32, normal, tiny, zeros
from pegainfer.ops.spec import Arrays, Case
from pegainfer.ops.stored import plain

Array = np.ndarray[Any, Any]
BLOCK_SIZE = 16


def kv_append_cases(rng: np.random.Generator) -> list[Case]:
    """Slots in no order, the pool's first and last, values that float16 holds as denormals or not at all."""
    cases = []
    shapes = (
        (1, 1, 32, 16),
        (2, 3, 64, 16),
        (5, 2, 80, 32),
        (40, 1, 96, 16),
        (3, 8, 128, 16),
        (17, 2, 256, 16),
    )
    flavours: tuple[Flavour, ...] = (normal, tiny, huge, zeros, normal, denormal)
    for (t, g, d, s), flavour in zip(shapes, flavours, strict=True):
        n, y = -(-t // s) + 2, 3
        slots = rng.permutation(n * s)[:t]
        if t > 1:
            slots[slots == 0], slots[slots == n * s - 1] = slots[0], slots[-1]
            slots[0], slots[-1] = 0, n * s - 1
        cases.append(
            Case(
                f"{t} tokens, {g} heads of {d}, {flavour.__name__}",
                {"T": t, "N": n, "Y": y, "G": g, "S": s, "D": d},
                {"layer": int(rng.integers(y))},
                {
                    "kv": np.full((n, y, 2, g, s, d), np.nan, np.float32),
                    "k": flavour(rng, (t, g, d)),
                    "v": flavour(rng, (t, g, d)) * np.float32(1e-6),
                    "slots": i32(slots),
                },
            )
        )
    attrs = {**cases[3].attrs, "k_scale": 0.37, "v_scale": 2.9e-6}  # whose reciprocals are rounded
    return [*cases, replace(cases[3], label=f"{cases[3].label}, with scales", attrs=attrs)]


class _Batch(msgspec.Struct, frozen=True):
    """Rows as (context length, query length), and the heads that look at them."""

    label: str
    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 1
    group: int = 3
    head_dim: int = 64
    block_size: int = BLOCK_SIZE
    q: Flavour = normal
    k: Flavour = normal
    v: Flavour = normal
    q_size: float = 1.0
    scale: float | None = None
    scales: tuple[float, float] = (1.0, 1.0)  # of stored keys and values


def _saw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Keys alike but for a sign, so that scores are equal in two groups."""
    values: Array = np.where(rng.random(shape[:-1]) < 0.5, np.float32(1), np.float32(-1))[..., None]
    return np.broadcast_to(values, shape).copy()


def _with_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal, but for a NaN in the last of them: a softmax that passes over it gives a plausible answer."""
    values = normal(rng, shape)
    values[..., -1, shape[-1] // 2] = np.nan
    return values


_BATCHES = (
    _Batch("decode of a first token", ((1, 1),)),
    _Batch("decode below, at and past a block's end", ((15, 1), (16, 1), (17, 1), (32, 1), (33, 1))),
    _Batch("decode over a long context", ((1100, 1), (3, 1)), kv_heads=2),
    _Batch("prefill of one block", ((16, 16),)),
    _Batch("prefill across blocks", ((41, 41),), kv_heads=3),
    _Batch("chunks after a prefix", ((40, 7), (33, 1), (64, 32), (17, 2)), kv_heads=2, group=2),
    _Batch("prefill, chunks and decodes together", ((1, 1), (16, 16), (17, 1), (50, 3), (33, 33), (100, 1))),
    _Batch("many rows", tuple((1 + 7 * i % 45, 1) for i in range(70)), group=1),
    _Batch("a group of one", ((20, 20), (35, 1)), kv_heads=4, group=1, head_dim=32),
    _Batch("a group of four, heads of 80", ((19, 4), (35, 1)), group=4, head_dim=80),
    _Batch("a group of eight, heads of 128", ((18, 18), (16, 1)), group=8, head_dim=128),
    _Batch("heads of 96", ((21, 5), (48, 1)), kv_heads=2, head_dim=96),
    _Batch("heads of 256, a scale of its own", ((34, 3), (5, 1)), group=4, head_dim=256, scale=0.3),
    _Batch("blocks of 32", ((31, 1), (33, 33), (65, 2)), block_size=32),
    _Batch("scores far apart: one key takes all", ((40, 3), (17, 1)), q_size=300.0),
    _Batch("equal scores", ((40, 3), (17, 1)), k=equal),
    _Batch("equal scores in two groups", ((40, 3), (17, 1)), k=_saw, q_size=30.0),
    _Batch("queries of zero", ((40, 3), (17, 1)), q=zeros),
    _Batch("huge values", ((40, 3), (17, 1)), v=huge),
    _Batch("tiny keys and values", ((40, 3), (17, 1)), k=tiny, v=tiny),
    _Batch("denormal values", ((40, 3), (17, 1)), v=denormal),
    _Batch("NaN among the keys", ((40, 3), (17, 1), (129, 1), (30, 30)), k=_with_nan),
    _Batch("queries of NaN", ((40, 3), (17, 1)), q=_with_nan),
    _Batch("scales of keys and values", ((40, 3), (17, 1), (30, 30)), kv_heads=2, scales=(0.37, 2.9)),
)


def attention_cases(rng: np.random.Generator) -> list[Case]:
    """Contexts that end below, at and past a block's end; blocks in no order; rows in no order; NaN in every
    place of the pool that no row's context covers. Past a row's blocks the table names a block of NaN.
    """
    return [_attention_case(rng, batch) for batch in _BATCHES]


def _attention_case(rng: np.random.Generator, b: _Batch) -> Case:
    layers, heads, rows = 2, b.kv_heads * b.group, len(b.rows)
    layer = int(rng.integers(layers))
    needed = [-(-context // b.block_size) for context, _ in b.rows]
    ids = rng.permutation(sum(needed) + 3)
    table = np.full((rows, max(needed) + 2), ids[-1], np.int32)
    kv = np.full((len(ids), layers, 2, b.kv_heads, b.block_size, b.head_dim), np.nan, np.float32)
    used = iter(ids)
    for row, (context, _) in enumerate(b.rows):
        for i in range(needed[row]):
            block = table[row, i] = next(used)
            held = min(b.block_size, context - i * b.block_size)
            for which, flavour in enumerate((b.k, b.v)):
                kv[block, layer, which, :, :held] = flavour(rng, (b.kv_heads, held, b.head_dim))
    lens = np.array([count for _, count in b.rows])
    order = rng.permutation(rows)  # where a row's tokens lie says nothing about its number
    starts = np.zeros(rows, int)
    starts[order] = np.cumsum(lens[order]) - lens[order]
    tokens = int(lens.sum())
    sizes = {"T": tokens, "H": heads, "D": b.head_dim, "R": rows, "W": table.shape[1]}
    sizes |= {"N": len(ids), "Y": layers, "G": b.kv_heads, "S": b.block_size}
    sizes |= {"C": sum(c for c, _ in b.rows), "Q": sum(q * c - q * (q - 1) // 2 for c, q in b.rows)}
    arrays = {
        "q": b.q(rng, (tokens, heads, b.head_dim)) * np.float32(b.q_size),
        "kv": kv,
        "query_starts": i32(starts),
        "query_lens": i32(lens),
        "context_lens": i32([c for c, _ in b.rows]),
        "block_table": table,
    }
    scale = b.head_dim**-0.5 if b.scale is None else b.scale
    attrs: dict[str, Any] = {"layer": layer, "scale": scale}
    if b.scales != (1.0, 1.0):
        attrs |= dict(zip(("k_scale", "v_scale"), b.scales, strict=True))
    return Case(b.label, sizes, attrs, arrays)


def attention_bound(case: Case) -> Arrays:
    """Weights err by their scores: a dot product of D in float32, then exp. The weighted sum of values errs
    by that share of Σ p |v|, and by its own length.
    """
    arrays, layer = case.arrays, case.attrs["layer"]
    scale = case.attrs["scale"] * case.attrs.get("k_scale", 1.0)
    q, kv = arrays["q"].astype(np.float64), arrays["kv"]
    group, out = q.shape[1] // kv.shape[3], np.zeros(q.shape)
    for row, context in enumerate(arrays["context_lens"]):
        blocks = arrays["block_table"][row, : -(-int(context) // kv.shape[4])]
        pages = plain(kv[blocks, layer]).astype(np.float64).transpose(1, 2, 0, 3, 4)  # [2, G, blocks, S, D]
        keys, values = pages.reshape(2, kv.shape[3], -1, kv.shape[5])[:, :, :context].repeat(group, axis=1)
        first, count = arrays["query_starts"][row], arrays["query_lens"][row]
        for t in range(first, first + count):
            seen = context - (first + count - 1 - t)
            scores = np.einsum("hsd,hd->hs", keys[:, :seen], q[t]) * scale
            terms = np.einsum("hsd,hd->hs", np.abs(keys[:, :seen]), np.abs(q[t])) * scale
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            share = 2 * (case.sizes["D"] / 4 + 8) * U * terms.max(axis=1) + (seen / 8 + 32) * U
            v = np.abs(values[:, :seen]) * case.attrs.get("v_scale", 1.0)
            out[t] = share[:, None] * np.einsum("hs,hsd->hd", p, v) + 2 * LEAST * (1 + v.sum(axis=1))
    return {"out": out}
