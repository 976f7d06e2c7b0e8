"""From a plan's rows to the arrays that a recorded program reads.

Arrays are allocated once at their largest and handed out as views, so one step is staged at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import PageGroup, RunnerInfo, StepPlan
from pegainfer.kv.device.slots import Slots

Array = np.ndarray[Any, Any]
_COLUMNS = tuple(attrgetter(name) for name in ("slot", "start", "count", "sample", "follow"))


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

    def advanced(self, steps: int) -> StagedRows:
        """These rows, which all are one token that is sampled, so many tokens on."""
        more = self.env["R"] * steps
        env = self.env | {"C": self.env["C"] + more, "Q": self.env["Q"] + more}
        return StagedRows(self.slots, self.starts + steps, self.counts, self.sampling, env)


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
        self._sizes = (-1, -1, -1)  # T, R and L of the views
        self._views: dict[str, Array] = {}
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
        num_rows = len(plan.rows)
        columns = (np.fromiter(map(get, plan.rows), np.int64, num_rows) for get in _COLUMNS)
        slots, starts, counts, sample, follow = columns
        known = self._slots.known[slots]
        # A followed row's token exists by now, unless its draw failed: then the last one is computed again.
        starts = np.where(follow, np.minimum(starts, known - counts), starts)
        context = starts + counts
        # Reductions and products of few numbers, without the wrappers of ndarray's methods, whose code is
        # far from the processor when a large model has just passed through its caches.
        num_tokens = int(np.add.reduce(counts))
        least = np.minimum(np.minimum(known - context, starts), counts - 1)
        if num_tokens > self._max_tokens or np.minimum.reduce(least, initial=0) < 0:
            raise InvariantError(f"step {plan.step} has impossible rows: {plan.rows}, known {known.tolist()}")
        sampling = sample.nonzero()[0]
        # Of a row with n tokens the last one meets `context` keys, each one before it one fewer.
        pairs = int(counts @ context) - (int(counts @ counts) - num_tokens) // 2
        env = {"T": num_tokens, "R": num_rows, "L": len(sampling)}
        env |= {"C": int(np.add.reduce(context)), "Q": pairs}
        return StagedRows(slots, starts, counts, sampling, env)

    def inputs(self, rows: StagedRows) -> dict[str, Array]:
        """The program's step inputs by name, int32; views that are valid until the next call.

        They are the same objects as long as a step's sizes are the same.
        """
        inputs = self._shaped(rows)
        if rows.decode:
            positions, slot_of = rows.starts, rows.slots
            inputs["logit_rows"][:] = rows.sampling
        else:
            first = np.cumsum(rows.counts) - rows.counts
            row_of = np.repeat(np.arange(len(rows.slots)), rows.counts)
            positions = np.arange(rows.env["T"]) + (rows.starts - first)[row_of]
            slot_of = rows.slots[row_of]
            inputs["query_starts"][:] = first
            inputs["query_lens"][:] = rows.counts
            inputs["logit_rows"][:] = (first + rows.counts - 1)[rows.sampling]
        context = rows.starts + rows.counts
        inputs["token_ids"][:] = self._slots.history[slot_of, positions]
        inputs["positions"][:] = positions
        inputs["context_lens"][:] = context
        longest = int(np.maximum.reduce(context, initial=0))
        for g, block_size, suffix, _, _ in self._pages:
            resident = self._slots.tables[g]
            block, offset = np.divmod(positions, block_size)
            inputs["slots" + suffix][:] = resident[slot_of, block] * block_size + offset
            reach = -(-longest // block_size)
            inputs["block_table" + suffix][:, :reach] = resident[rows.slots, :reach]
        return inputs

    def _shaped(self, rows: StagedRows) -> dict[str, Array]:
        """Views for the step's sizes; of rows with one token each, with what then is always the same."""
        num_tokens, num_rows, num_sampling = rows.env["T"], rows.env["R"], rows.env["L"]
        sizes = (num_tokens, num_rows, num_sampling)
        if sizes != self._sizes:
            self._sizes = sizes
            views = {n: a[:num_tokens] for n, a in self._by_token.items()}
            views |= {n: a[:num_rows] for n, a in self._by_row.items()}
            views["logit_rows"] = views["logit_rows"][:num_sampling]
            for _, _, suffix, places, blocks in self._pages:
                views |= {"slots" + suffix: places[:num_tokens], "block_table" + suffix: blocks[:num_rows]}
            if rows.decode:
                views["query_starts"][:] = np.arange(num_rows)
                views["query_lens"][:] = 1
            self._views = views
        return self._views
