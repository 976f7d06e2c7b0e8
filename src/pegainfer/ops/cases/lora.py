"""Hostile inputs and error bounds of the adapters' ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.common import LEAST, Flavour, U, huge, i32, mixed_rows, normal, outliers, tiny, zeros
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
NO_ADAPTER = -1

# T, A adapters, X greatest rank, width, flavour: no row, one of each size, widths of no multiple, many rows
SHAPES: tuple[tuple[int, int, int, int, Flavour], ...] = (
    (0, 1, 4, 8, normal),
    (1, 1, 1, 1, normal),
    (1, 2, 16, 64, normal),
    (3, 1, 5, 33, normal),
    (7, 3, 8, 250, normal),
    (40, 5, 16, 96, normal),
    (9, 2, 128, 576, normal),
    (130, 4, 3, 17, normal),
    (301, 4, 10, 80, normal),
    (5, 2, 8, 300, huge),
    (5, 3, 8, 48, tiny),
    (4, 2, 8, 40, zeros),
    (6, 2, 12, 100, outliers),
    (12, 3, 8, 70, mixed_rows),
)


def _rows(rng: np.random.Generator, tokens: int, adapters: int, rank: int) -> Arrays:
    """Tokens of every adapter and of none; ranks from none at all to more than there is room for."""
    ranks = rng.integers(0, rank + 1, adapters)
    ranks[-1] = rank + 3 if adapters > 2 else rank
    chosen = rng.integers(NO_ADAPTER, adapters, tokens)
    if tokens > 256:
        chosen.sort()  # long prompts: neighbours have the same adapter
    chosen[:1] = adapters - 1
    return {"adapters": i32(chosen), "ranks": i32(ranks)}


def _case(label: str, sizes: dict[str, int], arrays: Arrays) -> Case:
    return Case(f"{label} {'x'.join(map(str, sizes.values()))}", sizes, {}, arrays)


def lora_shrink_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(
            flavour.__name__, {"T": t, "A": z, "X": x, "K": k},
            {"a": flavour(rng, (t, k)), "down": normal(rng, (z, x, k)) / np.float32(k**0.5),
             **_rows(rng, t, z, x)},
        )
        for t, z, x, k, flavour in SHAPES
    ]  # fmt: skip


def lora_lookup_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(
            flavour.__name__, {"T": t, "A": z, "X": x, "V": v},
            {"table": flavour(rng, (z, v, x)), "ids": i32(rng.integers(0, v, t)), **_rows(rng, t, z, x)},
        )
        for t, z, x, v, flavour in SHAPES
    ]  # fmt: skip


def lora_expand_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _case(
            flavour.__name__, {"T": t, "A": z, "X": x, "N": n},
            {"x": flavour(rng, (t, n)), "h": normal(rng, (t, x)), "up": normal(rng, (z, x, n)),
             **_rows(rng, t, z, x)},
        )
        for t, z, x, n, flavour in SHAPES
    ]  # fmt: skip


def shrink_bound(case: Case) -> Arrays:
    """The error of each sum of K terms by their magnitudes: [T, X]."""
    a, down = (np.abs(case.arrays[n].astype(np.float64)) for n in ("a", "down"))
    k = a.shape[1]
    terms = np.einsum("tk,txk->tx", a, down[case.arrays["adapters"]])
    return {"out": (k / 8 + 16) * U * terms + LEAST * k}


def expand_bound(case: Case) -> Arrays:
    """The error of each sum of X terms onto x by their magnitudes: [T, N]."""
    x, h, up = (np.abs(case.arrays[n].astype(np.float64)) for n in ("x", "h", "up"))
    rank = h.shape[1]
    terms = x + np.einsum("tx,txn->tn", h, up[case.arrays["adapters"]])
    return {"x": (rank + 4) * U * terms + LEAST * rank}
