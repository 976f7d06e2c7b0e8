"""Hostile inputs and error bounds of the matrix products, alone and within coarse ops."""

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
    mixed_rows,
    normal,
    outliers,
    tiny,
    weights,
    zeros,
)
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
BLOCK = 32  # elements of a quantised weight that share a scale


def _shapes() -> list[tuple[int, int, int, Flavour]]:
    """(T, N, K, flavour): rows around every tile's edge; N of no multiple; K in and out of whole blocks."""
    shapes = [(t, n, k, normal) for t, (n, k) in product((1, 2, 3, 5, 8, 17), ((9, 64), (33, 96)))]
    shapes += [
        (0, 8, 32, normal),
        (1, 1, 1, normal),
        (4, 7, 33, normal),
        (3, 16, 7, normal),
        (2, 3, 250, normal),
    ]
    shapes += [(1, 50, 576, normal), (1, 24, 1536, normal), (40, 20, 192, normal), (130, 5, 64, normal)]
    shapes += [(t, 19, k, normal) for t, k in ((1, 512), (4, 256), (9, 768), (66, 256))]
    shapes += [(3, 17, 256, f) for f in (huge, outliers, zeros)]
    flavours = (huge, tiny, denormal, zeros, equal, outliers, mixed_rows)
    return shapes + [(t, 13, 160, f) for t, f in product((1, 9), flavours)]


def linear_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case(
            f"{t}x{k}x{n} {flavour.__name__}",
            {"T": t, "N": n, "K": k},
            {},
            {"a": flavour(rng, (t, k)), "w": weights(rng, n, k)},
        )
        for t, n, k, flavour in _shapes()
    ]


def linear_residual_cases(rng: np.random.Generator) -> list[Case]:
    """The same, added to a stream that is as large, far larger, or zero."""
    cases = []
    for case, size in zip(linear_cases(rng), (1, 1e3, 0) * 99, strict=False):
        x = normal(rng, (case.sizes["T"], case.sizes["N"])) * np.float32(size)
        cases.append(Case(f"{case.label} onto {size:g}", case.sizes, {}, {"x": x, **case.arrays}))
    return cases


def reduce_residual_cases(rng: np.random.Generator) -> list[Case]:
    """Partial results as large as the stream, far larger, and zero."""
    cases = []
    for t, n, size in ((1, 8, 1.0), (1, 576, 1e3), (3, 33, 1.0), (17, 64, 0.0), (70, 40, 1e-3)):
        arrays = {"x": normal(rng, (t, n)), "partial": normal(rng, (t, n)) * np.float32(size)}
        label = f"{t}x{n}, {f'normal times {size:g}' if size else 'zeros'}"
        cases.append(Case(label, {"T": t, "N": n}, {}, arrays))
    return cases


Dot = Callable[[Array, Array], Array]


def dot_f32(a: Array, w: Array) -> Array:
    """|error| of a · wᵀ in float32: [T, N].

    A sum over K in eight lanes or more errs by (K/8 + 16) U of its terms' magnitudes. Within a block of 32 a
    kernel may sum a · q and apply scale and minimum afterwards; those terms are as large as three times the
    block's largest weight.
    """
    a, w = np.abs(a.astype(np.float64)), np.abs(w.astype(np.float64))
    k = w.shape[1]
    error: Array = (k / 8 + 16) * U * (a @ (3 * _block_max(w)).T) + LEAST * k
    return error


def dot_int8(a: Array, w: Array) -> Array:
    """|error| where each 32 activations are rounded to int8 by a float32 scale of their own: [T, N].

    A rounding error is uniform within half a step, max|a| / 127 / 2, and independent of the others: eight
    standard deviations of the sum are seen once in 1e15.
    """
    wide, w64 = np.abs(a.astype(np.float64)), w.astype(np.float64)
    step = _block_max(wide) / 127
    error: Array = 8 * np.sqrt(step**2 / 12 @ (w64**2).T) + dot_f32(a, w)
    return error


def dot_bf16(a: Array, w: Array) -> Array:
    """|error| where activations are rounded to bf16, by 2^-8 of themselves at most: [T, N].

    Independent of each other as those of `dot_int8`, but equal activations share theirs: that moves
    the product by as much. What is below the least normal float32 may become 0.
    """
    a64, w64 = a.astype(np.float64), w.astype(np.float64)
    shared = 2.0**-8 * np.abs(a64 @ w64.T)
    error: Array = 8 * np.sqrt((a64 * 2.0**-7) ** 2 / 12 @ (w64**2).T) + shared + dot_f32(a, w)
    return error


def _block_max(w: Array) -> Array:
    """Each element's block's largest magnitude: [N, K]. What is left past whole blocks is one block."""
    starts = np.arange(0, w.shape[1], BLOCK)
    peaks = np.maximum.reduceat(w, starts, axis=1)
    spread: Array = np.repeat(peaks, np.diff([*starts, w.shape[1]]), axis=1)
    return spread


def linear_bound(dot: Dot) -> Callable[[Case], Arrays]:
    return lambda case: {"out": dot(case.arrays["a"], case.arrays["w"])}


def linear_residual_bound(dot: Dot) -> Callable[[Case], Arrays]:
    """The product's, and one rounding of a sum that may cancel."""
    return lambda case: {
        "x": dot(case.arrays["a"], case.arrays["w"]) + 2 * U * np.abs(case.arrays["x"].astype(np.float64))
    }
