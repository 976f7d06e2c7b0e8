"""One vector of a prompt: its hidden states, as forward passes leave them, added up or the last one kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pegainfer.kv.device.sampling import POOL_LAST, POOL_MEAN, POOL_NONE
from pegainfer.kv.device.slots import Slots
from pegainfer.kv.device.stage import StagedRows
from pegainfer.runner.sampling import Call

Array = np.ndarray[Any, Any]


class HiddenPart(NamedTuple):
    """Positions of one row whose hidden states are wanted; `x` is missing in the call."""

    row: int
    start: int  # position of the first
    call: Call


def hidden_parts(state: Slots, rows: StagedRows, largest: int) -> Iterator[HiddenPart]:
    """Of the rows within prompts that are to be pooled.

    Args:
        largest: positions a part.
    """
    asked = state.sampling.pooling[rows.slots]
    firsts = np.cumsum(rows.counts) - rows.counts
    for row in np.flatnonzero(asked != POOL_NONE).tolist():
        start, slot = int(rows.starts[row]), int(rows.slots[row])
        stop = min(start + int(rows.counts[row]), int(state.num_prompt[slot]))
        begin = stop - 1 if asked[row] == POOL_LAST else start
        for at in range(max(begin, start), stop, largest):
            first = int(firsts[row]) + at - start
            picked = np.arange(first, first + min(largest, stop - at), dtype=np.int32)
            yield HiddenPart(row, at, Call({"rows": picked}, {"T": rows.env["T"], "L": len(picked)}))


class Pools:
    """Sums under way, by slot. They are float64 and in the order of positions, so that chunks of any size
    give the same vector to the last bit."""

    def __init__(self) -> None:
        self._sums: dict[int, Array] = {}

    def add(self, slot: int, start: int, hidden: Array, pooling: int) -> None:
        """Takes hidden states [L, M] of the positions from `start` on, which come in order."""
        if pooling == POOL_LAST or start == 0:
            self._sums[slot] = np.zeros(hidden.shape[1])
        total = self._sums[slot]
        for state in hidden[-1:] if pooling == POOL_LAST else hidden:
            total += state

    def take(self, slot: int, num_prompt: int, pooling: int) -> bytes:
        """The vector of a prompt that is complete, float32 little-endian; its sum is forgotten."""
        total = self._sums.pop(slot)
        if pooling == POOL_MEAN:
            total = total / num_prompt
        return total.astype("<f4").tobytes()
