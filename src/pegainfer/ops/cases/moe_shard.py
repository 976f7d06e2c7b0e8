"""Inputs of the ops of a rank that holds some of a mixture's experts."""

from __future__ import annotations

import numpy as np

from pegainfer.ops.cases.common import i32
from pegainfer.ops.cases.moe import choices_of, moe_cases
from pegainfer.ops.spec import Case

STACKS = ("w_gate", "w_up", "w_down")


def local_experts_cases(rng: np.random.Generator) -> list[Case]:
    """All experts, the first, the last, and none of those chosen."""
    found = []
    sizes = ((1, 8, 8, 0, 8), (7, 3, 16, 0, 4), (300, 2, 16, 12, 4), (5, 4, 64, 60, 1), (0, 2, 4, 2, 2))
    for t, k, n, first, count in sizes:
        experts = i32(np.sort(np.argsort(rng.random((t, n)), axis=1)[:, :k], axis=1))
        label = f"{k} of {n}, {t} tokens, {count} from {first} on"
        attrs = {"first": first, "count": count}
        found.append(Case(label, {"T": t, "K": k}, attrs, {"experts": experts}))
    return found


def moe_shard_cases(rng: np.random.Generator) -> list[Case]:
    """Those of `moe` with half of the experts, an expert of the first token among them."""
    found = []
    for case in moe_cases(rng):
        total, chosen = case.sizes["N"], choices_of(case)
        held = total // 2
        first = min(int(chosen[0, -1]), total - held) if len(chosen) else 0
        arrays = {k: a[first : first + held] if k in STACKS else a for k, a in case.arrays.items()}
        sizes, attrs = {**case.sizes, "X": held}, {**case.attrs, "first": first, "count": held}
        found.append(Case(f"{case.label}, {held} from {first} on", sizes, attrs, arrays))
    return found
