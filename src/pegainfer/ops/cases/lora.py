"""Hostile inputs and error bounds of the adapters' ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.ops.cases.common import LEAST, Flavour, U, huge, i32, mixed_rows, normal, outliers, tiny, zeros
from pegainfer.ops.spec import Arrays, Case, Operand, Tolerance

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


# Layers with adapters

RANKS = (1, 16, 4, 40, 8, 128)  # greatest ranks of the cases in turn
ADAPTERS = (1, 3, 20)  # that the engine holds, likewise


def cases_with_adapters(
    cases: Sequence[Case], weights: Sequence[Operand], rng: np.random.Generator
) -> list[Case]:
    """The op's own cases; each token has one of the adapters or none."""
    made = []
    for i, case in enumerate(cases):
        count, rank = ADAPTERS[i % len(ADAPTERS)], RANKS[i % len(RANKS)]
        arrays = dict(case.arrays)
        for w in weights:
            if w.name not in arrays:
                continue
            n, k = arrays[w.name].shape
            arrays[f"down_{w.name}"] = normal(rng, (count, rank, k)) / np.float32(k**0.5)
            arrays[f"up_{w.name}"] = normal(rng, (count, rank, n)) / np.float32(2 * rank**0.5)
            given = _rows(rng, case.sizes["T"], count, rank)
            arrays[f"ranks_{w.name}"] = given["ranks"]
            arrays.setdefault("adapters", given["adapters"])
        label = f"{case.label}, {count} adapters of rank {rank}"
        made.append(Case(label, {**case.sizes, "I": count, "W": rank}, case.attrs, arrays))
    return made


def bounds_with_adapters(
    tolerances: Mapping[str, Tolerance], weights: Sequence[Operand]
) -> dict[str, Tolerance]:
    """The op's own tolerances with the weights that an adapter makes of the base's."""
    return {name: replace(t, bound=_bound(t, weights)) for name, t in tolerances.items()}


def _bound(tolerance: Tolerance, weights: Sequence[Operand]) -> Any:
    own = tolerance.bound
    assert own is not None

    def bound(case: Case) -> Arrays:
        """For each token the bound with its adapter's weights, four times for sums of two GEMMs more.

        It is that of the values or that of their magnitudes, for the sums of base and adapter may cancel.
        """
        adapters = case.arrays["adapters"]
        found: Arrays = {}
        for adapter in np.unique(adapters).tolist():
            for magnitude in (False, True):
                arrays = dict(case.arrays)
                for w in weights:
                    if adapter >= 0 and w.name in arrays:
                        arrays[w.name] = _adapted(arrays, w.name, adapter, magnitude)
                if magnitude:
                    arrays |= {n: np.abs(arrays[n]) for n in ("x", "a", "norm") if n in arrays}
                for name, error in own(replace(case, arrays=arrays)).items():
                    mine = _of_tokens(error, name, case, adapters == adapter)
                    found[name] = np.maximum(found.get(name, 0.0), 4 * mine)
        return found

    return bound


def _adapted(arrays: Arrays, name: str, adapter: int, magnitude: bool) -> Array:
    down, up, w = (arrays[n].astype(np.float64) for n in (f"down_{name}", f"up_{name}", name))
    rank = max(0, min(int(arrays[f"ranks_{name}"][adapter]), down.shape[1]))
    d, u = down[adapter, :rank], up[adapter, :rank]
    if magnitude:
        w, d, u = np.abs(w), np.abs(d), np.abs(u)
    made: Array = w + u.T @ d
    return made


def _of_tokens(error: Array, name: str, case: Case, mine: Array) -> Array:
    """The error of these tokens, 0 for others."""
    if name != "kv":
        return np.where(mine.reshape(-1, *[1] * (error.ndim - 1)), error, 0.0)
    kept = np.zeros_like(error)
    block, offset = np.divmod(case.arrays["slots"][mine], case.sizes["S"])
    kept[block, ..., offset, :] = error[block, ..., offset, :]
    return kept
