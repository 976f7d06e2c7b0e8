"""Carries out transfers beside the steps, on threads of its own.

    start ─► to the device   ─► a thread ─┐
          ─► from the device ─► a thread ─┼─► ended ─► collect
          ─► to or from a disk ─► threads ┤
          ─► from a peer ───────► threads ┘

Each of the first two takes what waits in batches, whose copies overlap where the device copies
asynchronously. Of what waits for a disk, loads go first. Copies and file access release the GIL.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from pegainfer.contract.errors import PegaError
from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.contract.tiers import DEVICE, TRANSFER_WAIT_SECONDS, Tier, Traffic, Transfer
from pegainfer.kv.device.store import BlockStore, Bytes

log = logging.getLogger(__name__)

PEER_THREADS = 4  # reads from peers that may be under way at once
DISK_THREADS = 4  # reads and writes of a disk that may be under way at once
# Copies between memories that are issued before one wait. Issuing them holds the interpreter's lock, which
# the engine's thread needs: steps beside batches of 128 copies took 1.8 times as long.
BATCH = 32


class DeviceCopies(Protocol):
    """Copies of whole device blocks. Calls for different blocks may come from several threads at once."""

    def gather(self, group: int, block: int, out: Bytes) -> None:
        """Begins to copy the parts of a block, one after the other, to `out`: [bytes of a block] uint8."""

    def scatter(self, group: int, block: int, data: Bytes) -> None:
        """The inverse of `gather`."""

    def finish(self) -> None:
        """Waits for what this thread has begun. Raises PegaError where a copy failed."""


class Ended(NamedTuple):
    """What StepResult says of transfers."""

    landed: tuple[int, ...]
    failed: dict[int, str]
    traffic: tuple[Traffic, ...]


class _Done(NamedTuple):
    transfer: Transfer
    error: str | None
    seconds: float


Entries = queue.PriorityQueue[tuple[int, int, Transfer | None]]  # None ends a thread


class Transfers:
    """Between a device's pools and the tiers' stores. `start` and `collect` come from one thread."""

    def __init__(
        self,
        device: DeviceCopies,
        tiers: Sequence[Tier],
        stores: Sequence[BlockStore],
        block_bytes: Sequence[int],
        free: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            stores: one a tier; closed with the transfers.
            block_bytes: by KV group.
            free: gives the stores' memory back, once they are closed.
        """
        self._device = device
        self._kinds = [tier.kind for tier in tiers]
        self._stores = stores
        self._block_bytes = block_bytes
        self._free = free
        self._up, self._down, self._disk, self._peer = Entries(), Entries(), Entries(), Entries()
        self._ended: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._in_flight = 0
        self._queues = [(self._up, BATCH), (self._down, BATCH)]  # of each thread, and what it takes at once
        self._queues += [(self._disk, 1)] * (DISK_THREADS if "disk" in self._kinds else 0)
        self._queues += [(self._peer, 1)] * (PEER_THREADS if "peer" in self._kinds else 0)
        self._threads = [
            threading.Thread(target=self._work, args=args, name="kv transfers", daemon=True)
            for args in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, plan: StepPlan) -> None:
        """Starts a plan's transfers. The content of their sources is complete, see Transfer."""
        if plan.reset_tiers:
            for store in self._stores:
                store.reset()
        self.start(plan.transfers)

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queues transfers; see Transfer for what they may rely on."""
        for t in transfers:
            pools = {t.source_pool, t.target_pool} - {DEVICE}
            up = t.target_pool == DEVICE
            kinds = {self._kinds[pool - 1] for pool in pools}
            slow = self._peer if "peer" in kinds else self._disk if "disk" in kinds else None
            (slow or (self._up if up else self._down)).put((int(not up), t.id, t))
            self._in_flight += 1

    def add_ended(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a plan that has ended, with the transfers that have ended since the one before."""
        ended = self.collect(TRANSFER_WAIT_SECONDS if plan.wait_transfers else 0.0)
        return msgspec.structs.replace(result, **ended._asdict()) if ended.landed or ended.failed else result

    def collect(self, wait_seconds: float = 0.0) -> Ended:
        """What has ended since the last call; waits for the first one for so long."""
        done: list[_Done] = []
        try:
            if wait_seconds and self._in_flight:
                done.append(self._ended.get(timeout=wait_seconds))
            while self._in_flight > len(done):
                done.append(self._ended.get_nowait())
        except queue.Empty:
            pass
        self._in_flight -= len(done)
        return Ended(
            tuple(d.transfer.id for d in done if d.error is None),
            {d.transfer.id: d.error for d in done if d.error is not None},
            self._traffic(done),
        )

    def _traffic(self, done: list[_Done]) -> tuple[Traffic, ...]:
        sums: dict[tuple[int, int], tuple[int, int, float]] = {}
        for transfer, error, seconds in done:
            if error is None:
                pools = transfer.source_pool, transfer.target_pool
                blocks, nbytes, before = sums.get(pools, (0, 0, 0.0))
                sums[pools] = blocks + 1, nbytes + self._block_bytes[transfer.group], before + seconds
        return tuple(Traffic(*pools, blocks, nbytes, s) for pools, (blocks, nbytes, s) in sums.items())

    def close(self) -> None:
        """Ends the transfers under way, drops those that wait, and closes the stores."""
        for i, (entries, _) in enumerate(self._queues):
            entries.put((-1, i, None))
        for store in self._stores:
            store.stop_waiting()
        for thread in self._threads:
            thread.join()
        for store in self._stores:
            store.close()
        if self._free is not None:
            self._free()

    # On the threads

    def _work(self, entries: Entries, most: int) -> None:
        while True:
            taken = [entries.get()[2]]
            with contextlib.suppress(queue.Empty):
                while taken[-1] is not None and len(taken) < most:  # each thread takes one None
                    taken.append(entries.get_nowait()[2])
            self._run([t for t in taken if t is not None])
            if None in taken:
                return

    def _run(self, batch: list[Transfer]) -> None:
        """Copies a batch and reports how each transfer ended."""
        started = time.perf_counter()
        errors = [_error_of(partial(self._copy, t)) for t in batch]
        unfinished = _error_of(self._device.finish)
        each = (time.perf_counter() - started) / max(1, len(batch))
        for t, error in zip(batch, errors, strict=True):
            if unfinished is not None and t.target_pool != DEVICE:
                self._stores[t.target_pool - 1].forget(t.group, t.target)
            self._ended.put(_Done(t, error or unfinished, each))

    def _copy(self, t: Transfer) -> None:
        """Begins a copy between memories; ends one of a disk."""
        device = self._device

        def gather(out: Bytes) -> None:
            device.gather(t.group, t.source, out)
            if self._stores[t.target_pool - 1].buffered:
                device.finish()

        def scatter(data: Bytes) -> None:
            device.scatter(t.group, t.target, data)
            if self._stores[t.source_pool - 1].buffered:
                device.finish()

        def pass_on(data: Bytes) -> None:
            self._stores[t.target_pool - 1].write(t.group, t.target, t.key, lambda out: np.copyto(out, data))

        if t.source_pool == DEVICE:
            self._stores[t.target_pool - 1].write(t.group, t.target, t.key, gather)
        else:
            use = scatter if t.target_pool == DEVICE else pass_on
            self._stores[t.source_pool - 1].read(t.group, t.source, t.key, use)


def _error_of(call: Callable[[], None]) -> str | None:
    """What went wrong in a call, as it is reported; None where nothing did."""
    try:
        call()
    except PegaError as error:
        return str(error)
    except Exception as error:
        log.exception("a KV transfer failed")
        return type(error).__name__
    return None
