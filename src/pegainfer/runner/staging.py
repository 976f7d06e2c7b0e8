"""From a plan's rows to the arrays that a recorded program reads.

Arrays are allocated once at their largest and handed out as views, so one step is staged at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import PageGroup, RunnerInfo, StepPlan
from pegainfer.runner.slots import Slots

Array = np.ndarray[Any, Any]
_COLUMNS = tuple(attrgetter(name) for name in ("slot", "start", "count", "sample", "follow"))
NONE = -1  # no state is saved


class StateSave(NamedTuple):
    """The state after one token of the step is also written to another state of the pool."""

    group: int
    row: int
    token: int  # index in the step
    state: int


class StagedRows(msgspec.Struct, frozen=True):
    """A step's rows in numbers; R rows, L of them sample.

    Args:
        slots, starts, counts: [R] int64, with `follow` resolved.
        sampling: [L] int64, which rows sample.
        env: sizes T, R, L, and C and Q for costs (cached tokens read, query-key pairs).
        saves: the plan's snapshots.
    """

    slots: Array
    starts: Array
    counts: Array
    sampling: Array
    env: dict[str, int]
    saves: tuple[StateSave, ...] = ()

    @property
    def decode(self) -> bool:
        """Whether every row is one token."""
        return self.env["T"] == self.env["R"]

    def advanced(self, steps: int, saves: tuple[StateSave, ...] = ()) -> StagedRows:
        """The same rows `steps` tokens on, with other snapshots; each row is one token that is sampled."""
        more = self.env["R"] * steps
        env = self.env | {"C": self.env["C"] + more, "Q": self.env["Q"] + more}
        return StagedRows(self.slots, self.starts + steps, self.counts, self.sampling, env, saves)


class Staging:
    """Fills the step inputs of a forward program.

    token_ids, positions: [T]; query_starts, query_lens, context_lens: [R]; logit_rows: [L], the last token
    of each sampling row. With adapters: `adapters` [T] and `logit_adapters` [L], the adapter of each token
    and sampling row or -1. For each group of pages `<group>.places`: [T], where each token goes (block · S +
    offset), and `<group>.block_table`: [R, W]; for each group of states `<group>.state_ids`: [R], and
    `<group>.state_saves`: [T], the state that the state after each token is also written to, or -1.
    """

    def __init__(self, slots: Slots, info: RunnerInfo, inputs: Collection[str]) -> None:
        """`inputs`: names of the program's inputs; nothing else is staged."""
        tokens, rows = info.max_tokens, info.max_slots
        self._slots = slots
        self._max_tokens = tokens
        self._sizes = (-1, -1, -1)  # T, R and L of the views
        self._views: dict[str, Array] = {}
        self._needed: dict[str, Array] = {}  # those of the views that the program has
        self._by_token = {n: np.zeros(tokens, np.int32) for n in ("token_ids", "positions", "adapters")}
        self._by_row = {n: np.zeros(rows, np.int32) for n in ("query_starts", "query_lens", "context_lens")}
        self._by_logit = {n: np.zeros(rows, np.int32) for n in ("logit_rows", "logit_adapters")}
        self._pages: list[tuple[Array, int, str, str]] = []  # slots' table, block size, names of inputs
        self._states: list[tuple[int, Array, str, str]] = []  # group, slots' table, names of inputs
        for g, (group, table) in enumerate(zip(info.kv.groups, slots.tables, strict=True)):
            if isinstance(group, PageGroup):
                places, blocks = f"{group.name}.places", f"{group.name}.block_table"
                self._by_token[places] = np.zeros(tokens, np.int32)
                self._by_row[blocks] = np.zeros_like(table)
                self._pages.append((table, group.block_size, places, blocks))
            else:
                ids, saves = f"{group.name}.state_ids", f"{group.name}.state_saves"
                self._by_row[ids] = np.zeros(rows, np.int32)
                self._by_token[saves] = np.zeros(tokens, np.int32)
                self._states.append((g, table, ids, saves))
        self._inputs = inputs

    def rows(self, plan: StepPlan) -> StagedRows:
        """A plan's rows in numbers.

        Raises InvariantError for a plan that computes unknown tokens, computes more than a step may, or keeps
        a state at a position that it does not compute.
        """
        num_rows = len(plan.rows)
        columns = (np.fromiter(map(get, plan.rows), np.int64, num_rows) for get in _COLUMNS)
        slots, starts, counts, sample, follow = columns
        known = self._slots.known[slots]
        # A followed row's token exists by now, unless its draw failed: then the last one is computed again.
        starts = np.where(follow, np.minimum(starts, known - counts), starts)
        context = starts + counts
        # Plain ufuncs rather than the methods of ndarray, whose Python wrappers are cold in the processor's
        # caches after a large model's step.
        num_tokens = int(np.add.reduce(counts))
        least = np.minimum(np.minimum(known - context, starts), counts - 1)
        if num_tokens > self._max_tokens or np.minimum.reduce(least, initial=0) < 0:
            raise InvariantError(f"step {plan.step} has impossible rows: {plan.rows}, known {known.tolist()}")
        sampling = sample.nonzero()[0]
        # The last of a row's n tokens meets `context` keys, each token before it one fewer.
        pairs = int(counts @ context) - (int(counts @ counts) - num_tokens) // 2
        env = {"T": num_tokens, "R": num_rows, "L": len(sampling)}
        env |= {"C": int(np.add.reduce(context)), "Q": pairs}
        saves = self.state_saves(plan, starts, counts) if plan.snapshots else ()
        return StagedRows(slots, starts, counts, sampling, env, saves)

    def state_saves(self, plan: StepPlan, starts: Array, counts: Array) -> tuple[StateSave, ...]:
        """The plan's snapshots as tokens of the step.

        A row that starts at the position or behind it has no such token: an earlier row has passed it. Raises
        InvariantError for a snapshot behind its row.
        """
        row_of = {row.slot: i for i, row in enumerate(plan.rows)}
        firsts = np.cumsum(counts) - counts
        found: list[StateSave] = []
        for snapshot in plan.snapshots:
            row = row_of.get(snapshot.slot)
            if row is None or not self._is_state(snapshot.group):
                raise InvariantError(f"step {plan.step} has an impossible snapshot: {snapshot}")
            index = snapshot.position - int(starts[row]) - 1
            if 0 <= index < counts[row]:
                save = StateSave(snapshot.group, row, int(firsts[row]) + index, snapshot.state)
                found.append(save)
            elif index >= 0 and not plan.rows[row].follow:  # a draw that failed moves a following row back
                raise InvariantError(f"step {plan.step} has a snapshot behind its row: {snapshot}")
        return tuple(found)

    def _is_state(self, group: int) -> bool:
        return any(g == group for g, *_ in self._states)

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
        if self._slots.max_adapters:
            inputs["adapters"][:] = self._slots.adapters[slot_of]
            inputs["logit_adapters"][:] = self._slots.adapters[rows.slots[rows.sampling]]
        inputs["context_lens"][:] = context
        longest = int(np.maximum.reduce(context, initial=0))
        for table, block_size, places, blocks in self._pages:
            block, offset = np.divmod(positions, block_size)
            inputs[places][:] = table[slot_of, block] * block_size + offset
            reach = -(-longest // block_size)
            inputs[blocks][:, :reach] = table[rows.slots, :reach]
        for group, table, ids, saves in self._states:
            inputs[ids][:] = table[rows.slots, 0]
            inputs[saves][:] = NONE
            for save in rows.saves:
                if save.group == group:
                    inputs[saves][save.token] = save.state
        return self._needed

    @property
    def positions(self) -> Array:
        """[T], of the step staged last."""
        return self._views["positions"]

    def _shaped(self, rows: StagedRows) -> dict[str, Array]:
        """Views for the step's sizes; of rows with one token each, with what then is always the same."""
        num_tokens, num_rows, num_sampling = rows.env["T"], rows.env["R"], rows.env["L"]
        sizes = (num_tokens, num_rows, num_sampling)
        if sizes != self._sizes:
            self._sizes = sizes
            views = {n: a[:num_tokens] for n, a in self._by_token.items()}
            views |= {n: a[:num_rows] for n, a in self._by_row.items()}
            views |= {n: a[:num_sampling] for n, a in self._by_logit.items()}
            if rows.decode:
                views["query_starts"][:] = np.arange(num_rows)
                views["query_lens"][:] = 1
            self._views = views
            self._needed = {n: a for n, a in views.items() if n in self._inputs}
        return self._views
