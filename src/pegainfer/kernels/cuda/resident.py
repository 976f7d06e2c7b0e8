"""What outlives a step on the device beside the cache: token histories and block tables of every slot.

The host sends what has changed. Of a decode step it need not send more than which slots are at which
positions, and nothing while the batch goes on: one launch makes all inputs. For other steps two copies bring
`token_ids`, which may be tokens that the host has not seen yet, and `block_table`, which is large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.gemm import row_threads, vector_width
from pegainfer.runtime.cuda.launch import Launch, i32, ptr, struct
from pegainfer.runtime.cuda.memory import StagingRing
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
CHANGES = 4096  # table entries that one launch writes
RING = 4  # pinned slots: two steps in flight, one being filled, one to spare
NO_LIMIT = 2**31 - 1
DECODE_INPUTS = (
    "token_ids", "positions", "query_starts", "query_lens", "context_lens", "logit_rows", "slots",
    "block_table",
)  # fmt: skip


class ResidentState:
    """Z slots, X history's width, W blocks a sequence, T tokens a step. All work is the context's stream's.

    Args:
        history: [Z, X] i32, bound to the sampler as its state.
        tables: [Z, W] i32.
        token_ids: [T] i32 and block_table: [Z, W] i32, bound to the forward pass as inputs.
        batch: [1 + 3 Z] i32, of the decode step to come: how many rows; slot, position, logit row of each.
    """

    def __init__(
        self, ctx: CudaContext, slots: int, history_width: int, blocks: int, tokens: int, block_size: int
    ) -> None:
        """Raises CudaError where memory is short."""
        self._ctx = ctx
        self._block_size = block_size
        self.history = DeviceTensor.empty((slots, history_width), "i32", "token histories")
        self.tables = DeviceTensor.empty((slots, blocks), "i32", "block tables")
        self.token_ids = DeviceTensor.empty((tokens,), "i32", "token ids")
        self.block_table = DeviceTensor.empty((slots, blocks), "i32", "a step's block table")
        self.batch = DeviceTensor.empty((1 + 3 * slots,), "i32", "a decode step's batch")
        self._ticket = DeviceTensor.empty((1,), "u32", "steps published")
        for t in (self.history, self.tables, self.token_ids, self.block_table, self.batch, self._ticket):
            ctx.stream.fill(t.address, 0, t.nbytes)
        self._places = DeviceTensor.empty((slots + tokens,), "i32", "places of a step's rows and tokens")
        self._changes = DeviceTensor.empty((3, CHANGES), "i32", "changes of block tables")
        self._histories = StagingRing(RING, 4 * history_width, "token histories")
        self._place_ring = StagingRing(RING, 4 * (slots + tokens), "places")
        self._change_ring = StagingRing(RING, 4 * 3 * CHANGES, "changes of block tables")
        self._batch_ring = StagingRing(RING, self.batch.nbytes, "batches")
        self._launches: dict[tuple[str, int], Launch] = {}

    def enter(self, slot: int, tokens: Array) -> None:
        """Writes the history of a slot from its start: tokens [n] int32."""
        # Many may come in one step, behind one that still runs: nobody waits while they fit into the ring.
        host, data = self._histories.room(tokens.nbytes)
        data.view(np.int32)[...] = tokens
        address = self.history.address + 4 * slot * self.history.shape[1]
        self._ctx.stream.upload(address, host, tokens.nbytes, "token history")
        self._histories.sent(self._ctx.stream)

    def extend(self, slots: list[int], places: list[int], blocks: list[int]) -> None:
        """tables[slots[i], places[i]] = blocks[i]; each place at most once a call."""
        for start in range(0, len(slots), CHANGES):
            part = [v[start : start + CHANGES] for v in (blocks, slots, places)]
            count = _rounded(len(part[0]), CHANGES)
            _, host, data = self._change_ring.take()
            table = data[: 12 * count].view(np.int32).reshape(3, count)
            table[1] = -1  # padding writes nowhere
            for row, values in zip(table, part, strict=True):
                row[: len(values)] = values
            self._ctx.stream.upload(self._changes.address, host, 12 * count, "changes of block tables")
            self._change_ring.sent(self._ctx.stream)
            self._launch("append_tokens", count)

    def gather(self, slots: Array, token_places: Array) -> None:
        """Fills token_ids and block_table for a step.

        Args:
            slots: [R] of its rows.
            token_places: [T] slot · X + position of its tokens.
        """
        rows, tokens = len(slots), len(token_places)
        most_rows, most = self.tables.shape[0], self.token_ids.shape[0]
        if rows > most_rows or tokens > most:
            raise OpError("a step is too large", expected=(most_rows, most), got=(rows, tokens))
        padded = _rounded(tokens, most)
        _, host, data = self._place_ring.take()
        words = data.view(np.int32)
        words[:rows] = slots
        words[rows:most_rows] = 0
        words[most_rows : most_rows + tokens] = token_places
        words[most_rows + tokens : most_rows + padded] = 0
        self._ctx.stream.upload(self._places.address, host, 4 * (most_rows + padded), "places")
        self._place_ring.sent(self._ctx.stream)
        self._launch("tokens", padded)
        self._launch("rows", _rounded(rows, most_rows))

    def enter_batch(self, slots: Array, positions: Array, logit_rows: Array) -> None:
        """Sets the rows of the next decode step: [R], [R] and [L] integers, L ≤ R.

        Every such step leaves them one position further on.
        """
        rows = len(slots)
        if rows > self.tables.shape[0]:
            raise OpError("a step is too large", expected=self.tables.shape[0], got=rows)
        _, host, data = self._batch_ring.take()
        words = data.view(np.int32)
        words[0] = rows
        columns = words[1 : 1 + 3 * rows].reshape(rows, 3)
        columns[:, 0] = slots
        columns[:, 1] = positions
        columns[: len(logit_rows), 2] = logit_rows
        columns[len(logit_rows) :, 2] = 0
        self._ctx.stream.upload(self.batch.address, host, 4 * (1 + 3 * rows), "batch")
        self._batch_ring.sent(self._ctx.stream)

    def decode_inputs(self, rows: int, address: Callable[[str], int], counters: Sequence[int]) -> Launch:
        """Makes the inputs of a decode step that is padded to `rows`.

        Args:
            address: of the forward pass's inputs by name, for that many rows.
            counters: of the sampler's inputs history_lens and draws, [rows] i32, each then one higher.
        """
        outputs = [ptr(address(name)) for name in DECODE_INPUTS]
        states = [ptr(t.address) for t in (self.batch, self.history, self.tables)]
        widths = [i32(t.shape[1]) for t in (self.history, self.tables)]
        args = struct(*outputs, *map(ptr, counters), *states, *widths, i32(self._block_size))
        kernel = self._ctx.library.kernel("decode_inputs")
        return Launch(kernel, (rows, 1, 1), 128, [args], label=f"decode inputs {rows}")

    def publish(self, tokens: int, status: int, rows: int, ring: tuple[int, int, int]) -> Launch:
        """Writes a step's tokens and status to the next slot of the host's ring.

        Args:
            tokens, status: addresses of [rows] i32.
            ring: address, slots, and rows that a slot has room for.
        """
        address, slots, width = ring
        args = struct(
            ptr(tokens), ptr(status), ptr(address), ptr(self._ticket.address), i32(rows), i32(width),
            i32(slots),
        )  # fmt: skip
        kernel, pdl = self._ctx.library.kernel("publish_drawn"), self._ctx.device.info.pdl
        return Launch(kernel, (1, 1, 1), 256, [args], pdl=pdl, label=f"publish {rows}")

    def _launch(self, what: str, count: int) -> None:
        launch = self._launches.get((what, count))
        if launch is None:
            launch = self._launches[what, count] = self._packed(what, count)
        launch(self._ctx.stream)

    def _packed(self, what: str, count: int) -> Launch:
        label = f"{what} {count}"
        if what == "append_tokens":
            at, width = self._changes.address, self.tables.shape[1]
            args = [ptr(self.tables.address), *(ptr(at + 4 * count * i) for i in range(3))]
            kernel = self._ctx.library.kernel("append_tokens")
            return Launch(kernel, (-(-count // 256), 1, 1), 256, [*args, i32(count), i32(width)], label=label)
        slots, width = self.tables.shape
        if what == "tokens":
            out, source, rows, width = self.token_ids, self.history, self._places.address + 4 * slots, 1
        else:
            out, source, rows = self.block_table, self.tables, self._places.address
        each, suffix = vector_width(width, "f32")  # words, whatever they hold
        kernel = self._ctx.library.kernel(f"take_rows_32{suffix}")
        args = [ptr(out.address), ptr(source.address), ptr(rows), i32(width), i32(NO_LIMIT)]
        return Launch(kernel, (count, 1, 1), row_threads(width, each), args, label=label)


def _rounded(count: int, most: int) -> int:
    """The next power of two, so that few launches serve all counts."""
    return min(most, 1 << max(0, count - 1).bit_length())
