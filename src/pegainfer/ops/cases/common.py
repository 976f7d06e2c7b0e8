"""Values that break kernels: huge, tiny, denormal, negative zero, rows of zeros, rows of equals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Flavour = Callable[["np.random.Generator", tuple[int, ...]], Array]

U = 2.0**-24  # unit roundoff of float32: one operation errs by at most so much of its result
LEAST = 2.0**-126  # smallest normal float32: below it a kernel may flush to zero


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Standard normal, as activations after a norm are."""
    return rng.standard_normal(shape, np.float32)


def huge(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Around 1e15: sums of thousands of squares are still float32 numbers; those of float16 are not."""
    return normal(rng, shape) * np.float32(1e15)


def tiny(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Around 1e-20: squares are denormal."""
    return normal(rng, shape) * np.float32(1e-20)


def denormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Float32 denormals of both signs."""
    return normal(rng, shape) * np.float32(1e-39)


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Zeros of both signs."""
    return np.where(rng.random(shape) < 0.5, np.float32(-0.0), np.float32(0.0))


def equal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One value throughout."""
    return np.full(shape, np.float32(rng.standard_normal()))


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One channel in fifty is a thousand times the others, as in the residual streams of real models."""
    return normal(rng, shape) * np.where(rng.random(shape[-1]) < 0.02, np.float32(1e3), np.float32(1))


def mixed_rows(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Rows that take their flavour in turn, so that one row's trouble would show in its neighbours."""
    kinds = (normal, zeros, outliers, tiny, equal, huge)
    rows = [kinds[i % len(kinds)](rng, (1, *shape[1:])) for i in range(shape[0])]
    return np.concatenate(rows) if rows else np.empty(shape, np.float32)


def weights(rng: np.random.Generator, n: int, k: int) -> Array:
    """[N, K] float32 of a trained layer's size, with a row of zeros, one of equals, one a thousand fold."""
    w = rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5)
    if n >= 4:
        rows = rng.permutation(n)[:3]
        w[rows[0]], w[rows[1]], w[rows[2]] = 0, w[rows[1], 0], w[rows[2]] * np.float32(1e3)
    return w


def i32(values: Any) -> Array:
    return np.asarray(values, np.int32)
