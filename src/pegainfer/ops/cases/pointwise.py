"""Hostile inputs and error bounds of normalisation, rotation, activation and row lookups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

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
    zeros,
)
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
FLAVOURS: tuple[Flavour, ...] = (normal, huge, tiny, denormal, zeros, equal, outliers, mixed_rows)
# rows, width: none, one, odd, not a multiple of any vector, a model's, many short rows
SHAPES = ((0, 64), (1, 1), (1, 7), (3, 33), (5, 64), (2, 576), (1, 4097), (129, 40))


def _by_flavour(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], Flavour]]:
    """Every shape with normal values, and every other flavour on some shape."""
    rest = [(shapes[i % len(shapes)], f) for i, f in enumerate(FLAVOURS[1:], start=2)]
    return [(shape, normal) for shape in shapes] + [(s if 0 not in s else shapes[-1], f) for s, f in rest]


def _gain(rng: np.random.Generator, width: int) -> Array:
    gain = 1 + normal(rng, (width,)) / 4
    gain[width // 2], gain[-1] = 0, -gain[-1]
    return gain


def rms_norm_cases(rng: np.random.Generator) -> list[Case]:
    """Widths that fill no vector, squares that overflow float16 or vanish, rows of zeros."""
    return [
        Case(
            f"{t}x{m} {flavour.__name__}",
            {"T": t, "M": m},
            {"eps": 1e-5 if flavour is normal else 1e-6},
            {"x": flavour(rng, (t, m)), "weight": _gain(rng, m)},
        )
        for (t, m), flavour in _by_flavour(SHAPES)
    ]


def head_norm_cases(rng: np.random.Generator) -> list[Case]:
    """The same for each head."""
    shapes = ((1, 1, 2), (2, 3, 32), (1, 9, 64), (3, 2, 80), (2, 1, 128), (1, 4, 256), (70, 2, 96))
    return [
        Case(
            f"{t}x{h}x{d} {flavour.__name__}",
            {"T": t, "H": h, "D": d},
            {"eps": 1e-6},
            {"x": flavour(rng, (t, h, d)), "weight": _gain(rng, d)},
        )
        for (t, h, d), flavour in _by_flavour(shapes)
    ]


def norm_bound(output: str) -> Callable[[Case], Arrays]:
    """A sum of n squares in float32 errs by n U at most, its root by half; denormal x may be flushed."""

    def bound(case: Case) -> Arrays:
        x, weight = case.arrays["x"].astype(np.float64), np.abs(case.arrays["weight"].astype(np.float64))
        eps, width = case.attrs["eps"], x.shape[-1]
        want = np.abs(x) / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight
        return {output: (width / 2 + 8) * U * want + 2 * LEAST / np.sqrt(eps) * weight}

    return bound


def gated_norm_cases(rng: np.random.Generator) -> list[Case]:
    """Heads of every remainder; gates on both sides of where exp over- and underflows."""
    shapes = (
        (1, 1, 2),
        (2, 3, 32),
        (1, 9, 64),
        (3, 2, 80),
        (2, 1, 128),
        (1, 4, 256),
        (70, 2, 96),
        (0, 2, 16),
    )
    return [
        Case(
            f"{t}x{h}x{d} {flavour.__name__}",
            {"T": t, "H": h, "D": d},
            {"eps": 1e-6},
            {"x": flavour(rng, (t, h, d)), "gate": _gates(rng, (t, h, d)), "weight": _gain(rng, d)},
        )
        for (t, h, d), flavour in _by_flavour(shapes)
    ]


def gated_norm_bound(case: Case) -> Arrays:
    """The norm's times silu, and the norm times what silu may be flushed to (`silu_mul_bound`)."""
    gate = np.abs(case.arrays["gate"].astype(np.float64))
    error = norm_bound("out")(case)["out"]
    x, weight = (np.abs(case.arrays[name].astype(np.float64)) for name in ("x", "weight"))
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + case.attrs["eps"]) * weight
    return {"out": error * gate + 4 * LEAST * (gate * (normed + error) + 1)}


def sigmoid_gate_cases(rng: np.random.Generator) -> list[Case]:
    """Gates on both sides of where exp over- and underflows; x of every flavour."""
    return [
        Case(
            f"{t}x{a} {flavour.__name__}",
            {"T": t, "A": a},
            {},
            {"x": flavour(rng, (t, a)), "gate": _gates(rng, (t, a))},
        )
        for (t, a), flavour in _by_flavour(SHAPES)
    ]


def sigmoid_gate_bound(case: Case) -> Arrays:
    """Where sigmoid(gate) is below the least normal float32 it may be flushed or clamped there."""
    return {"x": 4 * LEAST * (np.abs(case.arrays["x"].astype(np.float64)) + 1)}


def _gates(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Gates around 0 and at the edges of exp; the last channel of each row is ordinary."""
    gate = normal(rng, shape) * np.float32(40)
    edges = np.array([-1.5, 0.0, -0.0, 87.3, -87.3, -88.8, 88.8, 104, -104, 1e4, -1e4, 1e-30, -1e-30])
    gate.flat[: min(gate.size, len(edges))] = edges[: gate.size]
    gate[..., -1] = rng.uniform(1, 2, shape[:-1])
    return gate


def silu_mul_cases(rng: np.random.Generator) -> list[Case]:
    """Gates on both sides of where exp over- and underflows; up of every flavour."""
    return [
        Case(
            f"{t}x{f} {flavour.__name__}",
            {"T": t, "F": f},
            {},
            {"gate": _gates(rng, (t, f)), "up": flavour(rng, (t, f))},
        )
        for (t, f), flavour in _by_flavour(SHAPES)
    ]


def silu_mul_bound(case: Case) -> Arrays:
    """Where sigmoid(gate) is below the least normal float32 it may be flushed or clamped there."""
    gate, up = (np.abs(case.arrays[name].astype(np.float64)) for name in ("gate", "up"))
    return {"out": 4 * LEAST * (gate * up + 1)}


def rope_cases(rng: np.random.Generator) -> list[Case]:
    """The last row of the table, the first, one position many times, positions far apart in one step."""
    cases = []
    shapes = ((1, 1, 2), (2, 3, 32), (5, 9, 64), (3, 2, 80), (4, 1, 128), (2, 4, 256), (70, 2, 96))
    for ((t, h, d), flavour), theta in zip(_by_flavour(shapes), (1e4, 5e5) * 8, strict=False):
        length = 4099
        positions = rotation_positions(rng, t, length)
        table = rotation_table(length, d, theta)
        cases.append(
            Case(
                f"{t}x{h}x{d} {flavour.__name__}",
                {"T": t, "H": h, "D": d, "P": length},
                {},
                {"x": flavour(rng, (t, h, d)), "positions": i32(positions), "cos_sin": table},
            )
        )
    return cases


def rotation_positions(rng: np.random.Generator, tokens: int, length: int) -> Array:
    """The first and the last position, the last one twice, the rest anywhere: [T]."""
    positions = rng.integers(0, length, tokens)
    if tokens:
        positions[0], positions[-1], positions[tokens // 2] = 0, length - 1, length - 1
    return positions


def rotation_table(length: int, width: int, theta: float) -> Array:
    """cos then sin of each pair's angle: [P, D] float32."""
    angles = np.arange(length)[:, None] * theta ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rope_bound(case: Case) -> Arrays:
    """Two products, their sum and the stored result, each rounded: 3 U of terms that may cancel."""
    x = np.abs(case.arrays["x"].astype(np.float64))
    first, second = np.split(x, 2, axis=-1)
    each = 3 * U * (first + second) + 2 * LEAST
    return {"x": np.concatenate([each, each], axis=-1)}


def embedding_cases(rng: np.random.Generator) -> list[Case]:
    """The first and the last id, one id many times, widths of every remainder."""
    cases = []
    for t, v, m in (
        (1, 1, 1),
        (1, 257, 32),
        (4, 3, 7),
        (9, 50, 96),
        (130, 100, 64),
        (3, 1000, 576),
        (5, 90, 512),
    ):
        ids = rng.integers(0, v, t)
        ids[0], ids[-1], ids[t // 2] = 0, v - 1, v - 1
        table = normal(rng, (v, m)) / 8
        table[0] = -table[0]
        cases.append(Case(f"{t} of {v}x{m}", {"T": t, "V": v, "M": m}, {}, {"table": table, "ids": i32(ids)}))
    return cases


def embedding_bound(case: Case) -> Arrays:
    """Exact where the table is not in blocks; d · q + m, fused or not, differs by U of its larger term."""
    table, ids = case.arrays["table"], case.arrays["ids"]
    return {"out": 4 * U * np.abs(table[ids].astype(np.float64)).max(axis=-1, keepdims=True)}


def gather_rows_cases(rng: np.random.Generator) -> list[Case]:
    """No rows, rows out of order, one row twice; NaN where nothing is picked."""
    cases = []
    for (t, m), count in product(((1, 1), (5, 33), (40, 576)), (0, 1, 3)):
        rows = rng.integers(0, t, count)
        rows[:1], rows[2:] = t - 1, rows[:1] if count > 2 else []
        x = normal(rng, (t, m))
        x[np.setdiff1d(np.arange(t), rows)] = np.nan
        cases.append(
            Case(f"{count} of {t}x{m}", {"T": t, "L": count, "M": m}, {}, {"x": x, "rows": i32(rows)})
        )
    return cases
