"""What stays on a GPU between steps beside the KV pools: token histories and block tables of every slot.

The host sends what has changed. Of a decode step it sends at most which slots are at which positions, and
nothing while the same batch goes on: one launch makes all inputs. For other steps one launch gathers
`token_ids`, which may be tokens that the host has not seen yet, and the block tables, which are large.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.contract.step import PageGroup, RunnerInfo, StepPlan
from pegainfer.runner.slots import table_widths
from pegainfer.runner.staging import NONE, StateSave
from pegainfer.runtime.cuda.arguments import DECODE_INPUTS, GATHER_INPUTS, MAX_GROUPS, PUBLISH
from pegainfer.runtime.cuda.launch import Launch, i32, ptr, struct
from pegainfer.runtime.cuda.memory import StagingRing
from pegainfer.runtime.cuda.module import Kernel
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
CHANGES = 4096  # table entries that one launch writes
RING = 4  # pinned slots: two steps in flight, one being filled, one to spare
ALIGN = 4  # table entries: 16 bytes
THREADS = 256
ROW_INPUTS = (
    "token_ids", "positions", "query_starts", "query_lens", "context_lens", "logit_rows", "adapters",
    "logit_adapters",
)  # fmt: skip


class _Group(NamedTuple):
    """Columns [first, first + width) of a slot's tables; block_size is 0 for a group of states."""

    by_row: str  # names of the group's inputs: block table or state ids,
    by_token: str  # token places or state saves
    first: int
    width: int
    block_size: int


class ResidentState:
    """Z slots, X history's width, T tokens a step. All work is put on one stream.

    Args:
        history: [Z, X] i32, bound to the sampler as its state.
        tables: [Z, C] i32; the tables of all groups lie side by side. Behind them is a slot's adapter, where
            the runner has adapters.
        bound: inputs of the forward pass that `gather` and `decode_inputs` fill: token_ids [T] i32, and the
            block table [Z, W] i32 of each group of pages.
        batch: [1 + B Z] i32, of the decode step to come: how many rows; then of each row slot, position,
            logit row and, for each group of states, the state that this step also writes, or -1.
    """

    def __init__(
        self,
        stream: Stream,
        kernel: Callable[[str], Kernel],
        info: RunnerInfo,
        inputs: Collection[str],
        pdl: bool,
    ) -> None:
        """
        Args:
            kernel: a compiled kernel by name.
            inputs: names of the forward pass's inputs; no block table of another is bound.
            pdl: whether launches may overlap (programmatic dependent launch).

        Raises CudaError where memory is short, UnsupportedError for more groups than the kernels know.
        """
        if len(info.kv.groups) > MAX_GROUPS:
            raise UnsupportedError(
                "too many KV groups", expected=f"at most {MAX_GROUPS}", got=len(info.kv.groups)
            )
        slots, tokens, history_width = info.max_slots, info.max_tokens, info.max_model_len + 1
        self._stream, self._kernel, self._pdl = stream, kernel, pdl
        self._groups, columns = _columns(info)
        self._adapter_column = columns
        self._has_adapters = info.max_adapters > 0
        columns += ALIGN * self._has_adapters
        self._num_states = sum(not g.block_size for g in self._groups)
        self._batch_width = 3 + self._num_states
        self._counts = [[0] * slots for _ in self._groups]  # blocks in each slot's table, by group
        self.history = DeviceTensor.empty((slots, history_width), "i32", "token histories")
        self.tables = DeviceTensor.empty((slots, columns), "i32", "block tables")
        self.bound = {"token_ids": DeviceTensor.empty((tokens,), "i32", "token ids")}
        for g in self._groups:
            if g.block_size and g.by_row in inputs:
                self.bound[g.by_row] = DeviceTensor.empty((slots, g.width), "i32", "a step's block table")
        self.batch = DeviceTensor.empty((1 + self._batch_width * slots,), "i32", "a decode step's batch")
        self._ticket = DeviceTensor.empty((1,), "u32", "steps published")
        for t in (self.history, self.tables, *self.bound.values(), self.batch, self._ticket):
            stream.fill(t.address, 0, t.nbytes)
        self._places = DeviceTensor.empty((slots + tokens,), "i32", "places of a step's rows and tokens")
        self._changes = DeviceTensor.empty((3, CHANGES), "i32", "changes of block tables")
        self._histories = StagingRing(RING, 4 * history_width, "token histories")
        self._place_ring = StagingRing(RING, 4 * (slots + tokens), "places")
        self._change_ring = StagingRing(RING, 4 * 3 * CHANGES, "changes of block tables")
        self._batch_ring = StagingRing(RING, self.batch.nbytes, "batches")
        self._launches: dict[tuple[int, ...], Launch] = {}

    def apply(self, plan: StepPlan) -> None:
        """Sends the histories and adapters of new slots, and the blocks that were appended to tables."""
        if plan.news and self._has_adapters:
            slots = [new.slot for new in plan.news]
            self.extend(slots, [self._adapter_column] * len(slots), [new.adapter for new in plan.news])
        for new in plan.news:
            for counts in self._counts:
                counts[new.slot] = 0
            self.enter(new.slot, np.frombuffer(new.tokens, "<i4"))
        if not plan.blocks:
            return
        slots = []
        columns: list[int] = []
        blocks: list[int] = []
        for change in plan.blocks:
            group, counts = self._groups[change.group], self._counts[change.group]
            start, many = group.first + counts[change.slot], len(change.blocks)
            if group.block_size:
                counts[change.slot] += many
            slots += [change.slot] * many
            columns += range(start, start + many)
            blocks += change.blocks
        self.extend(slots, columns, blocks)

    def enter(self, slot: int, tokens: Array) -> None:
        """Writes the history of a slot from its start: tokens [n] int32."""
        # Many may come in one step while another still runs; nothing waits as long as they fit into the ring.
        host, data = self._histories.room(tokens.nbytes)
        data.view(np.int32)[...] = tokens
        address = self.history.address + 4 * slot * self.history.shape[1]
        self._stream.upload(address, host, tokens.nbytes, "token history")
        self._histories.sent(self._stream)

    def extend(self, slots: list[int], columns: list[int], blocks: list[int]) -> None:
        """tables[slots[i], columns[i]] = blocks[i]; each place at most once a call."""
        for start in range(0, len(slots), CHANGES):
            part = [v[start : start + CHANGES] for v in (blocks, slots, columns)]
            count = _rounded(len(part[0]), CHANGES)
            _, host, data = self._change_ring.take()
            table = data[: 12 * count].view(np.int32).reshape(3, count)
            table[1] = -1  # padding writes nowhere
            for row, values in zip(table, part, strict=True):
                row[: len(values)] = values
            self._stream.upload(self._changes.address, host, 12 * count, "changes of block tables")
            self._change_ring.sent(self._stream)
            self._launch(self._write_changes, count)

    def gather(self, slots: Array, token_places: Array) -> None:
        """Fills `bound` for a step.

        Args:
            slots: [R] of its rows.
            token_places: [T] slot · X + position of its tokens.
        """
        rows, tokens = len(slots), len(token_places)
        most_rows, most = self.tables.shape[0], self.bound["token_ids"].shape[0]
        if rows > most_rows or tokens > most:
            raise OpError("a step is too large", expected=(most_rows, most), got=(rows, tokens))
        padded = _rounded(tokens, most)
        _, host, data = self._place_ring.take()
        words = data.view(np.int32)
        words[:rows] = slots
        words[rows:most_rows] = 0
        words[most_rows : most_rows + tokens] = token_places
        words[most_rows + tokens : most_rows + padded] = 0
        self._stream.upload(self._places.address, host, 4 * (most_rows + padded), "places")
        self._place_ring.sent(self._stream)
        self._launch(self._gather_inputs, padded, _rounded(rows, most_rows))

    def enter_batch(
        self, slots: Array, positions: Array, logit_rows: Array, saves: Sequence[StateSave] = ()
    ) -> None:
        """Sets the rows of the next decode step: [R], [R] and [L] integers, L ≤ R.

        Every such step leaves them one position further on, without saves.
        """
        rows, width = len(slots), self._batch_width
        if rows > self.tables.shape[0]:
            raise OpError("a step is too large", expected=self.tables.shape[0], got=rows)
        _, host, data = self._batch_ring.take()
        words = data.view(np.int32)
        words[0] = rows
        columns = words[1 : 1 + width * rows].reshape(rows, width)
        columns[:, 0] = slots
        columns[:, 1] = positions
        columns[: len(logit_rows), 2] = logit_rows
        columns[len(logit_rows) :, 2] = 0
        columns[:, 3:] = NONE
        for save in saves:
            before = self._groups[: save.group]
            columns[save.row, 3 + sum(not g.block_size for g in before)] = save.state
        self._stream.upload(self.batch.address, host, 4 * (1 + width * rows), "batch")
        self._batch_ring.sent(self._stream)

    def decode_inputs(
        self, rows: int, address: Callable[[str], int], counters: Sequence[int], inputs: Collection[str]
    ) -> Launch:
        """Makes the inputs of a decode step that is padded to `rows`.

        Args:
            address: of the forward pass's inputs by name, for that many rows.
            counters: of the sampler's inputs history_lens and draws, [rows] i32, each then one higher.
            inputs: names of that forward pass's inputs; no other is made.
        """

        def place(name: str) -> int:
            return address(name) if name in inputs else 0

        history_lens, draws = counters
        args = struct(
            DECODE_INPUTS, **{name: place(name) for name in ROW_INPUTS}, history_lens=history_lens,
            draws=draws, batch=self.batch.address, history=self.history.address, tables=self.tables.address,
            history_width=self.history.shape[1], table_width=self.tables.shape[1],
            batch_width=self._batch_width, adapter_column=self._adapter_column, num_groups=len(self._groups),
            unused=0, groups=self._group_args(place),
        )  # fmt: skip
        return Launch(self._kernel("decode_inputs"), (rows, 1, 1), 128, [args], label=f"decode inputs {rows}")

    def publish(self, tokens: int, status: int, rows: int, ring: tuple[int, int, int]) -> Launch:
        """Writes a step's tokens and status to the next slot of the host's ring.

        Args:
            tokens, status: addresses of [rows] i32.
            ring: address, slots, and rows that a slot has room for.
        """
        address, slots, width = ring
        args = struct(
            PUBLISH, tokens=tokens, status=status, ring=address, ticket=self._ticket.address, rows=rows,
            width=width, slots=slots,
        )  # fmt: skip
        kernel = self._kernel("publish_drawn")
        return Launch(kernel, (1, 1, 1), THREADS, [args], pdl=self._pdl, label=f"publish {rows}")

    def _launch(self, make: Callable[..., Launch], *counts: int) -> None:
        launch = self._launches.get(counts)
        if launch is None:
            launch = self._launches[counts] = make(*counts)
        launch(self._stream)

    def _write_changes(self, count: int) -> Launch:
        at, width = self._changes.address, self.tables.shape[1]
        args = [
            ptr(self.tables.address),
            *(ptr(at + 4 * count * i) for i in range(3)),
            i32(count),
            i32(width),
        ]
        grid = (-(-count // THREADS), 1, 1)
        return Launch(self._kernel("append_tokens"), grid, THREADS, args, label=f"table changes {count}")

    def _gather_inputs(self, tokens: int, rows: int) -> Launch:
        slots, width = self.tables.shape
        rows_at = self._places.address
        groups = self._group_args(lambda name: self.bound[name].address if name in self.bound else 0)
        args = struct(
            GATHER_INPUTS, token_ids=self.bound["token_ids"].address, history=self.history.address,
            places=rows_at + 4 * slots, rows=rows_at, tables=self.tables.address, tokens=tokens,
            table_width=width, num_groups=len(groups), groups=groups,
        )  # fmt: skip
        blocks = max(1, -(-tokens // THREADS) + rows)
        kernel = self._kernel("gather_inputs")
        return Launch(kernel, (blocks, 1, 1), THREADS, [args], label=f"gather inputs {tokens} {rows}")

    def _group_args(self, place: Callable[[str], int]) -> list[dict[str, int]]:
        """Members of each Group in a kernel's argument struct."""
        return [
            {
                "by_row": place(g.by_row), "by_token": place(g.by_token), "first": g.first,
                "width": g.width, "block_size": g.block_size, "unused": 0,
            }
            for g in self._groups
        ]  # fmt: skip


def _columns(info: RunnerInfo) -> tuple[list[_Group], int]:
    """Where each group's tables lie in a slot's row, and how wide a row is."""
    groups: list[_Group] = []
    end = 0
    for group, width in zip(info.kv.groups, table_widths(info.kv, info.max_model_len), strict=True):
        if isinstance(group, PageGroup):
            names, block_size = ("block_table", "places"), group.block_size
        else:
            names, block_size = ("state_ids", "state_saves"), 0
        groups.append(_Group(f"{group.name}.{names[0]}", f"{group.name}.{names[1]}", end, width, block_size))
        end = -(-(end + width) // ALIGN) * ALIGN
    return groups, end


def _rounded(count: int, most: int) -> int:
    """The next power of two, so that few launches serve all counts."""
    return min(most, 1 << max(0, count - 1).bit_length())
