"""From a plan's rows to the arrays that a recorded program reads.

Arrays are allocated once at their largest and handed out as views, so one step is staged at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import PageGroup, RunnerInfo, StepPlan
from pegainfer.kv.device.slots import Slots

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StagedRows:
    """A step's rows in numbers; R rows, L of them sample.

    Args:
        slots, starts, counts: [R] int64, with `follow` resolved.
        sampling: [L] int64, which rows sample.
        env: sizes T, R, L, and C and Q for costs (cached tokens read, query-key pairs).
    """

    slots: Array
    starts: Array
    counts: Array
    sampling: Array
    env: dict[str, int]

    @property
    def decode(self) -> bool:
        """Whether every row is one token."""
        return self.env["T"] == self.env["R"]

    def continues(self, last: StagedRows) -> bool:
        """Whether these are the rows of `last`, each one token on, and all sample."""
        count = len(self.slots)
        return (
            count == len(last.slots) == len(self.sampling) == len(last.sampling)
            and self.decode
            and last.decode
            and bool((self.slots == last.slots).all() and (self.starts == last.starts + 1).all())
        )


class Staging:
    """Fills the step inputs of a line whose groups are pages.

    token_ids, positions: [T]; query_starts, query_lens, context_lens: [R]; logit_rows: [L], the last token
    of each sampling row; for the first group slots: [T], the physical place block · S + offset of each token,
    and block_table: [R, W]; further groups' names end in their number: slots1, block_table1.
    """

    def __init__(self, slots: Slots, info: RunnerInfo) -> None:
        tokens, rows = info.max_tokens, info.max_slots
        self._slots = slots
        self._max_tokens = tokens
        self._by_token = {n: np.zeros(tokens, np.int32) for n in ("token_ids", "positions")}
        self._by_row = {
            n: np.zeros(rows, np.int32) for n in ("query_starts", "query_lens", "context_lens", "logit_rows")
        }
        self._pages = [
            (g, group.block_size, "" if g == 0 else str(g), np.zeros(tokens, np.int32), np.zeros_like(table))
            for g, (group, table) in enumerate(zip(info.kv.groups, slots.tables, strict=True))
            if isinstance(group, PageGroup)
        ]

    def rows(self, plan: StepPlan) -> StagedRows:
        """A plan's rows in numbers.

        Raises InvariantError for a plan that computes what no one knows or more than a step may.
        """
        table = np.array([(r.slot, r.start, r.count, r.sample, r.follow) for r in plan.rows], np.int64)
        slots, starts, counts, sample, follow = table.reshape(-1, 5).T
        known = self._slots.known[slots]
        # A followed row's token exists by now, unless its draw failed: then the last one is computed again.
        starts = np.where(follow, np.minimum(starts, known - counts), starts)
        context = starts + counts
        num_tokens, num_rows = int(counts.sum()), len(plan.rows)
        if (
            num_tokens > self._max_tokens
            or (context > known).any()
            or (counts < 1).any()
            or (starts < 0).any()
        ):
            raise InvariantError(f"step {plan.step} has impossible rows: {plan.rows}, known {known.tolist()}")
        sampling = np.flatnonzero(sample)
        pairs = int((counts * context - counts * (counts - 1) // 2).sum())
        env = {"T": num_tokens, "R": num_rows, "L": len(sampling), "C": int(context.sum()), "Q": pairs}
        return StagedRows(slots, starts, counts, sampling, env)

    def inputs(self, rows: StagedRows) -> dict[str, Array]:
        """The program's step inputs by name, int32; views that are valid until the next call."""
        slots_of, history = self._slots, self._slots.history
        slots, starts, counts, sampling = rows.slots, rows.starts, rows.counts, rows.sampling
        context = starts + counts
        num_tokens, num_rows = rows.env["T"], rows.env["R"]
        first = np.cumsum(counts) - counts
        row_of = np.repeat(np.arange(num_rows), counts)
        positions = np.arange(num_tokens) + (starts - first)[row_of]
        slot_of = slots[row_of]

        inputs = {n: a[:num_tokens] for n, a in self._by_token.items()}
        inputs |= {n: a[:num_rows] for n, a in self._by_row.items()}
        inputs["logit_rows"] = inputs["logit_rows"][: len(sampling)]
        inputs["token_ids"][:] = history[slot_of, positions]
        inputs["positions"][:] = positions
        inputs["query_starts"][:] = first
        inputs["query_lens"][:] = counts
        inputs["context_lens"][:] = context
        inputs["logit_rows"][:] = (first + counts - 1)[sampling]
        for g, block_size, suffix, places, blocks in self._pages:
            resident = slots_of.tables[g]
            block, offset = np.divmod(positions, block_size)
            places[:num_tokens] = resident[slot_of, block] * block_size + offset
            reach = -(-int(context.max(initial=0)) // block_size)
            blocks[:num_rows, :reach] = resident[slots, :reach]
            inputs["slots" + suffix] = places[:num_tokens]
            inputs["block_table" + suffix] = blocks[:num_rows]
        return inputs
