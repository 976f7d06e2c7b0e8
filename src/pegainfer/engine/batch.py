"""The plan under construction and what is left of its budget; the queue of those that wait for one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import BlockCopy, NewSlot, Row, SlotBlocks, StepPlan
from pegainfer.engine.sequence import Sequence

_rank = attrgetter("rank")


class Ranked:
    """Sequences in order of rank, the best first."""

    __slots__ = ("items", "num_tokens")

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        self.num_tokens = 0  # prompt tokens, summed

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_rank)
        self.num_tokens += seq.num_prompt

    def remove(self, seq: Sequence) -> None:
        i = bisect_left(self.items, seq.rank, key=_rank)
        if i == len(self.items) or self.items[i] is not seq:
            raise InvariantError(f"sequence {seq.number} is not in its queue")
        del self.items[i]
        self.num_tokens -= seq.num_prompt


class Batch:
    """Collects the parts of one plan. Sequences are marked as they are placed."""

    __slots__ = (
        "blocks",
        "copies",
        "counted",
        "decodes",
        "hungry",
        "later_decodes",
        "left",
        "news",
        "prefill_left",
        "prefills",
        "snapshots",
        "step",
    )

    def __init__(self, step: int, max_tokens: int, max_prefill_tokens: int) -> None:
        self.step = step
        self.left = max_tokens
        self.prefill_left = max_prefill_tokens
        self.later_decodes = 0  # decode rows that are still to come and must find room
        self.counted = False  # whether later_decodes was counted: only a step with a prefill needs it
        self.hungry = False  # a better-ranked sequence waits for blocks: nobody else may take any
        self.news: list[NewSlot] = []
        self.blocks: list[SlotBlocks] = []
        self.copies: list[BlockCopy] = []
        self.snapshots: list[BlockCopy] = []
        self.decodes: list[tuple[Row, Sequence]] = []
        self.prefills: list[tuple[Row, Sequence]] = []

    @property
    def prefill_room(self) -> int:
        """Tokens that a prefill row may take now."""
        return min(self.left - self.later_decodes, self.prefill_left)

    def place(self, seq: Sequence, row: Row, *, prefill: bool) -> None:
        """Adds a row and moves the sequence's plan forward."""
        self.left -= row.count
        if prefill:
            self.prefill_left -= row.count
            self.prefills.append((row, seq))
        else:
            self.decodes.append((row, seq))
        if not row.follow:
            seq.planned = row.start + row.count
        if row.sample:
            seq.sampling_rows += 1
        seq.flying += 1
        seq.last_step = self.step

    def build(self, frees: list[int]) -> tuple[StepPlan, list[Sequence]]:
        """The frozen plan, decodes first, and the sequences of its rows."""
        placed = self.decodes + self.prefills
        plan = StepPlan(
            step=self.step,
            frees=tuple(frees),
            news=tuple(self.news),
            blocks=tuple(self.blocks),
            copies=tuple(self.copies),
            rows=tuple([row for row, _ in placed]),
            snapshots=tuple(self.snapshots),
        )
        return plan, [seq for _, seq in placed]
