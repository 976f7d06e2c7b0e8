"""Hostile inputs and error bounds of the recurrent ops: rows of one and many tokens over a pool of states."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pegainfer.ops.cases.common import (
    LEAST,
    Flavour,
    U,
    denormal,
    huge,
    i32,
    mixed_rows,
    normal,
    outliers,
    tiny,
    zeros,
)
from pegainfer.ops.recurrence import log_decay, sigmoid, split_heads, unit_keys
from pegainfer.ops.spec import Arrays, Case
from pegainfer.ops.stored import plain

Array = np.ndarray[Any, Any]
LAYERS = 3
SLOPE_OF_SILU = 1.1  # its greatest

PADDING = 0  # context of a row without a state
_MIXED = ((1, 1), (30, 1), (5, 5), (PADDING, 2), (40, 7), (17, 1), (PADDING, 0), (9, 0), (19, 3), (2, 2))


class Rows(msgspec.Struct, frozen=True):
    """Rows as (context length, query length)."""

    label: str
    rows: tuple[tuple[int, int], ...]
    saved: float = 0.3  # share of tokens whose state is also written to another entry


ROW_SETS = (
    Rows("position 0", ((1, 1),)),
    Rows("one later token", ((9, 1),), saved=1.0),
    Rows("decode", ((4, 1), (1, 1), (300, 1), (2, 1), (77, 1)), saved=0.0),
    Rows("two tokens, fewer than the taps", ((2, 2), (8, 2))),
    Rows("a prompt", ((67, 67),)),
    Rows("chunks after a prefix", ((40, 7), (70, 66), (33, 1), (64, 32))),
    Rows("mixed rows, padding and rows without tokens", _MIXED),
    Rows("every state saved", ((5, 5), (20, 3)), saved=1.0),
    Rows("padding alone", ((PADDING, 1), (PADDING, 0))),
)
_LONG = Rows(
    "prompts longer than a chunk", ((130, 130), (70, 66), (1, 1), (200, 64), (PADDING, 3)), saved=0.05
)


def step_rows(rng: np.random.Generator, r: Rows) -> tuple[dict[str, int], Arrays, Array]:
    """Sizes, what says where rows and states lie, and the entries whose content is read.

    Entries and tokens of rows come in no order.
    """
    lens = np.array([count for _, count in r.rows])
    order = rng.permutation(len(lens))
    starts = np.zeros(len(lens), int)
    starts[order] = np.cumsum(lens[order]) - lens[order]
    tokens = int(lens.sum())
    saves = np.full(tokens, -1)
    for (context, count), first in zip(r.rows, starts, strict=True):
        if context != PADDING:
            saves[first : first + count][rng.random(count) < r.saved] = 0
    saved = np.flatnonzero(saves == 0)
    entries = rng.permutation(len(lens) + len(saved) + 2)
    ids = np.array([e if c != PADDING else -1 for (c, _), e in zip(r.rows, entries, strict=False)])
    saves[saved] = entries[len(lens) : len(lens) + len(saved)]
    arrays = {
        "state_ids": i32(ids),
        "state_saves": i32(saves),
        "query_starts": i32(starts),
        "query_lens": i32(lens),
        "context_lens": i32([context for context, _ in r.rows]),
    }
    read = np.array([e for (c, n), e in zip(r.rows, ids, strict=True) if c > n > 0], int)
    return {"T": tokens, "R": len(lens), "N": len(entries), "Y": LAYERS}, arrays, read


def state_pool(
    rng: np.random.Generator, sizes: dict[str, int], read: Array, layer: int, shape: tuple[int, ...]
) -> Array:
    """A pool of NaN but for the entries that rows go on from."""
    pool = np.full((sizes["N"], sizes["Y"], *shape), np.nan, np.float32)
    pool[read, layer] = normal(rng, (len(read), *shape))
    return pool


def conv_cases(rng: np.random.Generator) -> list[Case]:
    """Rows shorter and longer than the taps; NaN in every entry that no row goes on from."""
    widths = ((64, 4), (33, 4), (1, 2), (256, 4), (48, 3), (7, 4), (130, 4), (16, 5), (20, 4))
    flavours: tuple[Flavour, ...] = (normal, outliers, huge, tiny, mixed_rows, zeros, denormal)
    kinds: list[tuple[Rows, tuple[int, int], Flavour]]
    kinds = [(r, w, normal) for r, w in zip(ROW_SETS, widths, strict=True)]
    kinds += [(ROW_SETS[5 + i % 2], widths[i], f) for i, f in enumerate(flavours[1:])]
    return [_conv_case(rng, *kind) for kind in kinds]


def _conv_case(rng: np.random.Generator, r: Rows, widths: tuple[int, int], flavour: Flavour) -> Case:
    (channels, taps), layer = widths, int(rng.integers(LAYERS))
    sizes, arrays, read = step_rows(rng, r)
    sizes |= {"F": channels, "W": taps, "X": taps - 1}
    arrays |= {
        "conv": state_pool(rng, sizes, read, layer, (taps - 1, channels)),
        "x": flavour(rng, (sizes["T"], channels)),
        "taps": normal(rng, (taps, channels)),
    }
    label = f"{r.label}, {channels} channels, {taps} taps, {flavour.__name__}"
    return Case(label, sizes, {"layer": layer}, arrays)


def conv_bound(case: Case) -> Arrays:
    """The sum's error times the slope of silu, and silu's own; states are copies."""
    a, layer = case.arrays, case.attrs["layer"]
    taps, out = a["taps"].astype(np.float64), np.zeros(a["x"].shape)
    for row, state in enumerate(a["state_ids"]):
        first, count = a["query_starts"][row], a["query_lens"][row]
        if state < 0 or count == 0:
            continue
        fresh = a["context_lens"][row] == count
        before = np.zeros((len(taps) - 1, taps.shape[1])) if fresh else a["conv"][state, layer]
        inputs = np.concatenate([before, a["x"][first : first + count]]).astype(np.float64)
        for i in range(count):
            terms = taps * inputs[i : i + len(taps)]
            y, size = np.abs(terms.sum(axis=0)), np.abs(terms).sum(axis=0)
            error = (len(taps) + 1) * U * size + len(taps) * LEAST
            out[first + i] = SLOPE_OF_SILU * error + 16 * U * y + 4 * LEAST * (y + 1)
    return {"out": out}


def delta_cases(rng: np.random.Generator) -> list[Case]:
    """Heads that share keys; decays of nearly 1 and of 0; β of nearly 0 and 1; keys of zeros and alike."""
    # key heads, value heads a key head, K, V
    heads = (
        (1, 1, 16, 16),
        (2, 2, 32, 32),
        (1, 2, 128, 128),
        (3, 1, 20, 48),
        (2, 2, 16, 16),
        (1, 3, 64, 80),
        (1, 2, 128, 128),
        (2, 1, 128, 64),
        (1, 1, 256, 16),
    )
    flavours: tuple[Flavour, ...] = (outliers, huge, tiny, mixed_rows, zeros, denormal, _same_keys, _with_nan)
    kinds: list[tuple[Rows, tuple[int, int, int, int], Flavour]]
    kinds = [(r, h, normal) for r, h in zip(ROW_SETS, heads, strict=True)]
    kinds += [(ROW_SETS[5 + i % 2], heads[i % 6], f) for i, f in enumerate(flavours)]
    kinds += [(_LONG, (1, 3, 128, 64), normal), (_LONG, (2, 1, 128, 32), zeros)]
    return [_delta_case(rng, *kind) for kind in kinds]


def _same_keys(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """The same q, k and v for every token: each writes over what the one before it stored."""
    return np.broadcast_to(normal(rng, (1, *shape[1:])), shape).copy()


def _with_nan(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal, but for a NaN in one value channel of one token; other channels and rows stay clean."""
    values = normal(rng, shape)
    values[len(values) // 2, -1] = np.nan
    return values


def _delta_case(
    rng: np.random.Generator, r: Rows, heads: tuple[int, int, int, int], flavour: Flavour
) -> Case:
    keys, group, key_dim, value_dim = heads
    h, layer = keys * group, int(rng.integers(LAYERS))
    sizes, arrays, read = step_rows(rng, r)
    tokens = sizes["T"]
    sizes |= {"H": h, "K": key_dim, "V": value_dim, "F": 2 * keys * key_dim + h * value_dim}
    gates = normal(rng, (tokens, h)) * np.float32(3), normal(rng, (tokens, h)) * np.float32(3)
    edges = np.array([0.0, -0.0, 30.0, -30.0, 100.0, -100.0, 19.9, 20.1])
    for gate in gates:  # the last head of each token stays ordinary
        flat = gate[:, :-1].reshape(-1)
        flat[: len(edges)] = edges[: flat.size]
        gate[:, :-1] = flat.reshape(gate[:, :-1].shape)
    gates[1][:, -1] /= 3
    arrays |= {
        "delta": state_pool(rng, sizes, read, layer, (h, key_dim, value_dim)),
        "qkv": flavour(rng, (tokens, sizes["F"])),
        "a": gates[0],
        "b": gates[1],
        "a_log": np.log(rng.uniform(0.01, 16, h)).astype(np.float32),  # as models start: 0 < e^a_log < 16
        "dt_bias": np.log(np.expm1(rng.uniform(0.001, 0.1, h))).astype(np.float32),
    }
    label = f"{r.label}, {keys}x{group} heads of {key_dim}x{value_dim}, {flavour.__name__}"
    tiled = int(rng.integers(2))
    label += ", tiled" if tiled else ""
    return Case(label, sizes, {"layer": layer, "eps": 1e-6, "tiled": tiled}, arrays)


def delta_bound(case: Case) -> Arrays:
    """The rounding of each token's update, carried by the recurrence.

    A column of the state is a vector of K. Its error e becomes e^g (I - β k kᵀ) e and what this token's own
    roundings add; that matrix lengthens no vector, as |k| ≤ 1 and 0 ≤ β ≤ 1. So lengths of errors add up, and
    no element errs by more than its column's length.
    """
    a, s, layer = case.arrays, case.sizes, case.attrs["layer"]
    heads, width, eps, tiled = s["H"], s["K"], case.attrs["eps"], case.attrs["tiled"]
    q, k, v = split_heads(a["qkv"], heads, width, s["V"])
    q, k = unit_keys(q, eps, heads, tiled) * width**-0.5, unit_keys(k, eps, heads, tiled)
    decay, decay_error, beta, beta_error = _gate_errors(a)
    normed = (width / 2 + 12) * U  # relative, of q and k: half of the sum's, and their products
    summed = normed + (width + 16) * U
    least = 4 * LEAST * width / np.sqrt(eps)  # where q and k are flushed to zero
    errors = {"out": np.zeros((s["T"], heads, s["V"])), "delta": np.zeros(a["delta"].shape)}
    for row, state in enumerate(a["state_ids"]):
        first, count = a["query_starts"][row], a["query_lens"][row]
        if state < 0 or count == 0:
            continue
        held = plain(a["delta"][state, layer]).astype(np.float64)
        held = np.zeros_like(held) if a["context_lens"][row] == count else held
        e = np.zeros(held.shape[::2])  # [H, V]
        for t in range(first, first + count):
            flushed = LEAST * _length(held)
            held = held * decay[t][:, None, None]
            size = _length(held)
            seen = np.einsum("hkv,hk->hv", held, k[t])
            terms = np.einsum("hkv,hk->hv", np.abs(held), np.abs(k[t])) + least * size
            d = beta[t][:, None] * (v[t] - seen)
            moved = beta[t][:, None] * (
                (summed + decay_error[t])[:, None] * terms + 4 * U * (np.abs(v[t]) + np.abs(seen))
            )
            moved += beta_error[t][:, None] * np.abs(v[t] - seen) + 8 * U * np.abs(d) + LEAST
            held = held + k[t][:, :, None] * d[:, None]
            own = size * (decay_error[t] + 2 * U)[:, None] + 2 * U * _length(held) + flushed + width * LEAST
            e = decay[t][:, None] * e + own + moved + np.abs(d) * (normed + 4 * U + least)
            length = np.sqrt(np.sum(q[t] ** 2, axis=-1))[:, None]
            terms = np.einsum("hkv,hk->hv", np.abs(held), np.abs(q[t])) + least * _length(held)
            errors["out"][t] = (length + least) * e + summed * terms + width * LEAST
            for entry in (state, a["state_saves"][t]):
                if entry >= 0:
                    errors["delta"][entry, layer] = e[:, None]
    return errors


def _length(state: Array) -> Array:
    """Of each column: [H, V] of [H, K, V]."""
    result: Array = np.sqrt(np.sum(state**2, axis=1))
    return result


def _gate_errors(a: Arrays) -> tuple[Array, Array, Array, Array]:
    """e^g with its relative error, β with its absolute one: [T, H] each.

    exp and log1p err by 4 units in the last place at most. g errs by its sum's rounding too, and e^g by g's
    absolute error.
    """
    g, beta = log_decay(a["a"], a["a_log"], a["dt_bias"]), sigmoid(a["b"].astype(np.float64))
    x, rate = a["a"].astype(np.float64) + a["dt_bias"], np.exp(a["a_log"].astype(np.float64))
    error = rate * (sigmoid(x) * U * np.abs(x) + LEAST) + 16 * U * np.abs(g) + 8 * U
    return np.exp(g), error, beta, 8 * U * beta + 2 * LEAST
