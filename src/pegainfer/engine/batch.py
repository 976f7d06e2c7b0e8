"""The plan under construction, for one data-parallel rank, and what is left of the rank's budget."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from pegainfer.contract.step import BlockCopy, NewSlot, Row, SlotBlocks, StateSnapshot, StepPlan
from pegainfer.contract.tiers import Transfer
from pegainfer.engine.cost import DECODE_PERIOD, StepLoad, prefill_pairs
from pegainfer.engine.data_rank import DataRankState
from pegainfer.engine.sequence import Sequence

# Lists that ranks' batches are put together from.
PARTS = (
    "news",
    "blocks",
    "copies",
    "snapshots",
    "transfers",
    "decodes",
    "decode_seqs",
    "prefills",
    "prefill_seqs",
)


class Batch:
    """Collects the parts of one plan on one data-parallel rank. Sequences are marked as they are placed."""

    __slots__ = (
        "blocks",
        "budget",
        "context",
        "copies",
        "counted",
        "decode_seqs",
        "decodes",
        "drafts",
        "home",
        "hungry",
        "later_decodes",
        "left",
        "news",
        "pairs",
        "prefill_left",
        "prefill_seqs",
        "prefill_tokens",
        "prefills",
        "priced",
        "reset_tiers",
        "seconds_left",
        "snapshots",
        "step",
        "transfers",
    )

    def __init__(
        self, step: int, home: DataRankState, max_tokens: int, max_prefill_tokens: int, drafts: int = 0
    ) -> None:
        """`drafts`: that each decode row may have."""
        self.step = step
        self.home = home
        self.budget = self.left = max_tokens
        self.prefill_left = max_prefill_tokens
        self.drafts = drafts
        self.later_decodes = 0  # decode rows that are still to come and must find room
        self.counted = False  # whether later_decodes was counted: only a step with a prefill needs it
        self.context = 0  # positions that the later decode rows read
        self.priced = False  # whether seconds_left was set: only a step with a prefill needs it
        self.seconds_left = math.inf  # that prefill rows may still add to the step
        self.hungry = False  # a better-ranked sequence waits for blocks: nobody else may take any
        self.news: list[NewSlot] = []
        self.blocks: list[SlotBlocks] = []
        self.copies: list[BlockCopy] = []
        self.snapshots: list[StateSnapshot] = []
        self.reset_tiers = False  # what the runner's tiers hold is forgotten
        self.transfers: list[Transfer] = []
        self.decodes: list[Row] = []
        self.decode_seqs: list[Sequence] = []
        self.prefills: list[Row] = []
        self.prefill_seqs: list[Sequence] = []
        self.prefill_tokens = 0
        self.pairs = 0  # query tokens times keys, of the prefill rows

    @property
    def prefill_room(self) -> int:
        """Tokens that a prefill row may take now."""
        return min(self.left - self.later_decodes * (self.drafts + 1), self.prefill_left)

    def place_decode(self, seq: Sequence, start: int, follow: bool, drafts: int) -> None:
        """Adds a row of one known token and drafts, and moves the sequence's plan forward."""
        self.left -= drafts + 1
        self.decodes.append(Row(seq.slot, start, 1, True, follow, drafts))
        self.decode_seqs.append(seq)
        if not follow:
            seq.planned = start + 1
        seq.uncommitted += drafts + 1
        seq.flying += 1
        seq.last_step = self.step

    def place_prefill(self, seq: Sequence, start: int, count: int, sample: bool) -> None:
        """Adds a chunk and moves the sequence's plan forward."""
        self.left -= count
        self.prefill_left -= count
        self.prefill_tokens += count
        self.pairs += prefill_pairs(start, count)
        self.prefills.append(Row(seq.slot, start, count, sample))
        self.prefill_seqs.append(seq)
        seq.planned = start + count
        if sample:
            seq.uncommitted += 1
        seq.flying += 1
        seq.last_step = self.step

    @property
    def decode_tokens(self) -> int:
        """Positions that the decode rows compute."""
        return self.budget - self.left - self.prefill_tokens

    def placed_context(self) -> int:
        """Positions that the decode rows placed so far read."""
        return sum([row.start for row in self.decodes]) + len(self.decodes)

    def load(self) -> StepLoad | None:
        """What the finished plan asks of the device; None where it need not be observed."""
        if not self.prefill_tokens and self.step % DECODE_PERIOD:
            return None
        return StepLoad(self.prefill_tokens, len(self.decodes), self.placed_context(), self.pairs)

    def build(self, frees: list[int], repeats: bool = False) -> tuple[StepPlan, list[Sequence]]:
        """The frozen plan, decodes first, and the sequences of its rows. `repeats`: see StepPlan.

        A plan without rows is one that waits for transfers.
        """
        rows = tuple(self.decodes + self.prefills)
        plan = StepPlan(
            step=self.step,
            frees=tuple(frees),
            news=tuple(self.news),
            blocks=tuple(self.blocks),
            copies=tuple(self.copies),
            reset_tiers=self.reset_tiers,
            transfers=tuple(self.transfers),
            rows=rows,
            snapshots=tuple(self.snapshots),
            repeats=repeats,
            wait_transfers=not rows,
        )
        return plan, self.decode_seqs + self.prefill_seqs


def merged(batches: Seq[Batch]) -> Batch:
    """All data-parallel ranks' parts of one plan as one."""
    first = batches[0]
    out = Batch(first.step, first.home, 0, 0)
    for batch in batches:
        out.budget += batch.budget
        out.left += batch.left
        out.prefill_tokens += batch.prefill_tokens
        for name in PARTS:
            getattr(out, name).extend(getattr(batch, name))
    return out
