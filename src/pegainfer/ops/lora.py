"""What a token's LoRA adapter adds to a linear layer (arXiv:2106.09685): x += up · (down · a).

All adapters of an engine lie side by side, and every token names its own or none, so that any mix of them is
one batch with the same launches. Each token is computed alone: its result does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.lora import (
    expand_bound,
    lora_expand_cases,
    lora_lookup_cases,
    lora_shrink_cases,
    shrink_bound,
)
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Out, Tolerance, declare
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]
_F32 = "a float32 sum of K products in eight lanes or more errs by (K/8 + 16) · 2^-24 of their magnitudes"
_EXPAND = "a float32 sum of X products onto x errs by (X + 4) · 2^-24 of their magnitudes"


def all_of(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Ranks that leave out no channel."""
    return np.full(shape, np.iinfo(np.int32).max, np.int32)


def _lora_shrink(out: Array, a: Array, down: Array, adapters: Array, ranks: Array) -> None:
    out[...] = 0
    for t in np.flatnonzero(adapters >= 0).tolist():
        rank = min(int(ranks[adapters[t]]), out.shape[1])
        out[t, :rank] = down[adapters[t], :rank].astype(np.float64) @ a[t].astype(np.float64)


def _lora_lookup(out: Array, table: Array, ids: Array, adapters: Array, ranks: Array) -> None:
    out[...] = 0
    for t in np.flatnonzero(adapters >= 0).tolist():
        rank = min(int(ranks[adapters[t]]), out.shape[1])
        out[t, :rank] = table[adapters[t], ids[t], :rank]


def _lora_expand(x: Array, h: Array, up: Array, adapters: Array, ranks: Array) -> None:
    for t in np.flatnonzero(adapters >= 0).tolist():
        rank = min(int(ranks[adapters[t]]), h.shape[1])
        if rank:
            delta = h[t, :rank].astype(np.float64) @ up[adapters[t], :rank].astype(np.float64)
            x[t] = x[t].astype(np.float64) + delta


def _used(s: Sizes) -> int:
    """Adapters that a step reads at most."""
    return min(s["T"], s["A"])


LORA_SHRINK = declare(
    OpSpec(
        name="lora_shrink",
        doc="out[t] = down[adapters[t]] · a[t] in the channels below the adapter's rank, else 0",
        operands=(
            Out("out", "T X", ("f32",)),
            In("a", "T K"),
            In("down", "A X K"),
            In("adapters", "T", INTS, into="A"),
            In("ranks", "A", INTS, fill=all_of),
        ),
        reference=_lora_shrink,
        flops=lambda s: 2 * s["T"] * s["X"] * s["K"],
        bytes=lambda s, held: held["out"] + held["a"] + held["adapters"] + held["down"] // s["A"] * _used(s),
        idle="A",
        cases=lora_shrink_cases,
        tolerance={"f32": Tolerance(2.0**-23, 0.0, _F32, shrink_bound)},
    )
)

LORA_LOOKUP = declare(
    OpSpec(
        name="lora_lookup",
        doc="out[t] = table[adapters[t], ids[t]] in the channels below the adapter's rank, else 0",
        operands=(
            Out("out", "T X", ("f32",)),
            In("table", "A V X"),
            In("ids", "T", INTS, into="V"),
            In("adapters", "T", INTS, into="A"),
            In("ranks", "A", INTS, fill=all_of),
        ),
        reference=_lora_lookup,
        bytes=lambda s, held: 2 * held["out"] + held["ids"] + held["adapters"],
        idle="AV",
        cases=lora_lookup_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "a copy")},
    )
)

LORA_EXPAND = declare(
    OpSpec(
        name="lora_expand",
        doc="x[t] += h[t] · up[adapters[t]] over the channels below the adapter's rank",
        operands=(
            InOut("x", "T N"),
            In("h", "T X", ("f32",)),
            In("up", "A X N"),
            In("adapters", "T", INTS, into="A"),
            In("ranks", "A", INTS, fill=all_of),
        ),
        reference=_lora_expand,
        flops=lambda s: 2 * s["T"] * s["X"] * s["N"],
        bytes=lambda s, held: 2 * held["x"] + held["h"] + held["adapters"] + held["up"] // s["A"] * _used(s),
        idle="A",
        cases=lora_expand_cases,
        tolerance={"f32": Tolerance(2.0**-23, 0.0, _EXPAND, expand_bound)},
    )
)
