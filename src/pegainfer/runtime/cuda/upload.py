"""Weights from files to the device: readers fill pinned slots in parallel while earlier slots are copied."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.runtime.cuda.memory import PinnedBuffer
from pegainfer.runtime.cuda.stream import Event, Stream

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]  # bytes copied, bytes in all
SLOT_BYTES = 8 << 20  # copies of this size run at the bus's full rate
READERS = 8


@dataclass(frozen=True)
class WorkItem:
    """Part of a weight.

    Args:
        nbytes: what `read` fills.
        read: fills a uint8 array of nbytes; runs on a reader thread.
        send: puts the copy (and whatever converts it) on the stream; gets the slot's host address.
        label: names the weight in errors.
    """

    nbytes: int
    read: Callable[[Array], None]
    send: Callable[[int, Stream], None]
    label: str


def upload(
    work_items: Sequence[WorkItem],
    stream: Stream,
    progress: Progress | None = None,
    readers: int = READERS,
) -> None:
    """Reads and sends all work items; returns when the last copy has ended. Raises a read's or send's error.

    Work items may be sent out of order.
    """
    slots = 2 * readers
    ring = [PinnedBuffer(SLOT_BYTES, "weights ring") for _ in range(min(slots, max(1, len(work_items))))]
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(ring)):
        free.put(i)
    ready: queue.SimpleQueue[tuple[int, WorkItem] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()

    def fill(work_item: WorkItem) -> None:
        slot = free.get()
        if stop.is_set():
            free.put(slot)  # wakes the next reader, which gives up as well
            return
        try:
            work_item.read(ring[slot].bytes[: work_item.nbytes])
            ready.put((slot, work_item))
        except BaseException as e:
            ready.put(e)

    total = sum(p.nbytes for p in work_items)
    done = 0
    sent: list[tuple[Event, int]] = []
    with ThreadPoolExecutor(readers, thread_name_prefix="weights") as pool:
        for work_item in work_items:
            pool.submit(fill, work_item)
        try:
            for _ in work_items:
                while sent and sent[0][0].done():
                    free.put(sent.pop(0)[1])
                if len(sent) == len(ring):  # every slot is on its way: wait for the oldest
                    sent[0][0].wait("weights")
                    free.put(sent.pop(0)[1])
                item = _next(ready, sent, free)
                if isinstance(item, BaseException):
                    raise item
                slot, work_item = item
                work_item.send(ring[slot].address, stream)
                event = Event()
                event.record(stream)
                sent.append((event, slot))
                done += work_item.nbytes
                if progress is not None:
                    progress(done, total)
        finally:
            stop.set()
            free.put(0)
    stream.synchronize("weights")
    for buffer in ring:
        buffer.free()


def _next(
    ready: queue.SimpleQueue[tuple[int, WorkItem] | BaseException],
    sent: list[tuple[Event, int]],
    free: queue.SimpleQueue[int],
) -> tuple[int, WorkItem] | BaseException:
    """The next filled slot; slots whose copies end meanwhile go back to the readers."""
    while True:
        try:
            return ready.get(timeout=0.002 if sent else None)
        except queue.Empty:
            while sent and sent[0][0].done():
                free.put(sent.pop(0)[1])
