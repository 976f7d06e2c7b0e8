"""Carries out the transfers of a host device beside its steps.

    start ─► a queue for copies in memory, one for those of a disk ─► threads ─► ended ─► collect

Transfers to the device go first: a request waits for them. Copies and file access release the GIL.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from pegainfer.contract.errors import PegaError
from pegainfer.contract.tiers import DEVICE, Tier, Traffic, Transfer
from pegainfer.kv.device.store import BlockStore, Bytes

log = logging.getLogger(__name__)

DISK_THREADS = 4  # reads and writes of a disk that may be under way at once


class DevicePools(Protocol):
    """Device blocks as bytes. Calls for different blocks may come from several threads at once."""

    def gather(self, group: int, block: int, out: Bytes) -> None:
        """Copies the parts of a block, one after the other, to `out`: [bytes of a block] uint8."""

    def scatter(self, group: int, block: int, data: Bytes) -> None:
        """The inverse of `gather`."""


class Ended(NamedTuple):
    """What StepResult says of transfers."""

    landed: tuple[int, ...]
    failed: dict[int, str]
    traffic: tuple[Traffic, ...]


class _Done(NamedTuple):
    transfer: Transfer
    error: str | None
    seconds: float


class HostTransfers:
    """Threads that copy between the device's pools and the tiers' stores. `start` and `collect` come from one
    thread."""

    def __init__(
        self,
        device: DevicePools,
        tiers: Sequence[Tier],
        stores: Sequence[BlockStore],
        block_bytes: Sequence[int],
    ) -> None:
        """
        Args:
            stores: one a tier; closed with the transfers.
            block_bytes: by KV group.
        """
        self._device = device
        self._kinds = [tier.kind for tier in tiers]
        self._stores = stores
        self._block_bytes = block_bytes
        # Entries are (whether the device is not the target, id, transfer); None ends a thread.
        self._memory: queue.PriorityQueue[tuple[int, int, Transfer | None]] = queue.PriorityQueue()
        self._disk: queue.PriorityQueue[tuple[int, int, Transfer | None]] = queue.PriorityQueue()
        self._ended: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._in_flight = 0
        disks = DISK_THREADS if "disk" in self._kinds else 0
        self._threads = [
            threading.Thread(target=self._work, args=(entries,), name="kv transfers", daemon=True)
            for entries in (self._memory, *[self._disk] * disks)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queues transfers; see Transfer for what they may rely on."""
        for t in transfers:
            pools = {t.source_pool, t.target_pool} - {DEVICE}
            on_disk = any(self._kinds[pool - 1] == "disk" for pool in pools)
            (self._disk if on_disk else self._memory).put((int(t.target_pool != DEVICE), t.id, t))
            self._in_flight += 1

    def reset(self) -> None:
        """The stores forget what they hold."""
        for store in self._stores:
            store.reset()

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
        for i, entries in enumerate((self._memory, *[self._disk] * DISK_THREADS)):
            entries.put((-1, i, None))
        for thread in self._threads:
            thread.join()
        for store in self._stores:
            store.close()

    # On the threads

    def _work(self, entries: queue.PriorityQueue[tuple[int, int, Transfer | None]]) -> None:
        while (t := entries.get()[2]) is not None:
            started = time.perf_counter()
            error: str | None = None
            try:
                self._copy(t)
            except PegaError as failure:
                error = str(failure)
            except Exception as failure:
                log.exception("transfer %s failed", t)
                error = type(failure).__name__
            self._ended.put(_Done(t, error, time.perf_counter() - started))

    def _copy(self, t: Transfer) -> None:
        if t.source_pool == DEVICE:
            self._stores[t.target_pool - 1].write(
                t.group, t.target, t.key, lambda out: self._device.gather(t.group, t.source, out)
            )
        elif t.target_pool == DEVICE:
            self._stores[t.source_pool - 1].read(
                t.group, t.source, t.key, lambda data: self._device.scatter(t.group, t.target, data)
            )
        else:
            source, target = self._stores[t.source_pool - 1], self._stores[t.target_pool - 1]
            source.read(t.group, t.source, t.key, lambda data: _pass_on(target, t, data))


def _pass_on(target: BlockStore, t: Transfer, data: Bytes) -> None:
    def fill(out: Bytes) -> None:
        out[:] = data

    target.write(t.group, t.target, t.key, fill)
