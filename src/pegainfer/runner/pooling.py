"""One vector of a prompt: its hidden states, as forward passes leave them, added up or the last one kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pegainfer.runner.sampling import Call
from pegainfer.runner.sampling_state import POOL_LAST, POOL_MEAN, POOL_NONE
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import StagedRows

Array = np.ndarray[Any, Any]


class HiddenPart(NamedTuple):
    """Positions of a prompt whose hidden states are wanted; `x` is missing in the call."""

    slot: int
    start: int  # position of the first
    pooling: int
    call: Call


class WholePrompt(NamedTuple):
    """A prompt whose vector is complete with this step."""

    row: int
    slot: int
    length: int
    pooling: int


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
            call = Call({"rows": picked}, {"T": rows.env["T"], "L": len(picked)})
            yield HiddenPart(slot, at, int(asked[row]), call)


def whole_prompts(state: Slots, rows: StagedRows) -> list[WholePrompt]:
    """Those to be pooled whose last position the step computes; asked before anything is drawn."""
    found = []
    for row in rows.sampling.tolist():
        slot = int(rows.slots[row])
        pooling, length = int(state.sampling.pooling[slot]), int(state.num_prompt[slot])
        if pooling != POOL_NONE and state.known[slot] == length:
            found.append(WholePrompt(row, slot, length, pooling))
    return found


class Pools:
    """Sums under way, by slot. They are float64 and in the order of positions, so that chunks of any size
    give the same vector to the last bit."""

    def __init__(self) -> None:
        self._sums: dict[int, Array] = {}

    def add(self, part: HiddenPart, hidden: Array) -> None:
        """Takes a part's hidden states, [L, M]; a prompt's parts come in order."""
        last = part.pooling == POOL_LAST
        if last or part.start == 0:
            self._sums[part.slot] = np.zeros(hidden.shape[1])
        total = self._sums[part.slot]
        for state in hidden[-1:] if last else hidden:
            total += state

    def take(self, prompt: WholePrompt) -> bytes:
        """A complete prompt's vector, float32 little-endian; its sum is forgotten."""
        total = self._sums.pop(prompt.slot)
        if prompt.pooling == POOL_MEAN:
            total = total / prompt.length
        return total.astype("<f4").tobytes()
