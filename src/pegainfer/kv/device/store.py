"""Where a tier keeps blocks: the interface of all kinds, and host memory."""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pegainfer.contract.errors import ConfigError, PegaError

log = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Use = Callable[[Bytes], None]  # reads or fills the content of one block: [nbytes] uint8


class StoreError(PegaError):
    """A tier does not have the wanted block, or cannot keep one. The block is then computed again."""


class BlockStore(Protocol):
    """One tier's memory. Calls for different blocks may come from several threads at once.

    The scheduler's bookkeeping ensures that no block is written while another call uses it.
    """

    @property
    def buffered(self) -> bool:
        """Whether content lies in a buffer during a call, so that a copy from or to it must end within it."""

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        """Keeps under `key` what `fill` puts into the memory that it is given.

        Raises StoreError; the block then holds nothing.
        """

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        """Gives `use` the content that was kept under `key`. Raises StoreError for anything else."""

    def forget(self, group: int, block: int) -> None:
        """The block holds nothing: what was written to it did not arrive."""

    def reset(self) -> None:
        """Forgets all blocks. What is being written meanwhile is not kept either."""

    def stop_waiting(self) -> None:
        """Calls that wait for memory end with a StoreError from now on."""

    def close(self) -> None:
        """Releases memory and files. No call is in progress."""


Allocate = Callable[[int], Bytes]  # memory of so many bytes


class HostStore:
    """Blocks in host memory, in slabs of a bounded size that are allocated one after the other.

    A thread allocates the slabs, so that page-locked memory, which takes its time, does not delay the start.
    A write waits until its slab is there.
    """

    buffered = False

    def __init__(
        self,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        allocate: Allocate | None = None,
        slab_bytes: int = 1 << 26,
    ) -> None:
        """
        Args:
            block_bytes, num_blocks: by KV group.
            allocate: makes a slab; None: all memory is reserved at once, and taken from the system as blocks
                are first written.
            slab_bytes: a slab holds as many whole blocks as fit, one at least.

        Raises ConfigError where the system does not reserve so much.
        """
        self._block_bytes = block_bytes
        sizes = list(zip(block_bytes, num_blocks, strict=True))
        self._per_slab = [max(1, slab_bytes // n) if allocate else max(1, count) for n, count in sizes]
        self._slabs: list[list[Bytes]] = [[] for _ in sizes]
        self._keys: list[dict[int, tuple[bytes, int]]] = [{} for _ in sizes]  # block -> key, epoch
        self._epoch = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None
        if allocate is None:
            self._slabs = [[reserve(n * count)] for n, count in sizes]
        else:
            args = allocate, num_blocks
            self._thread = threading.Thread(target=self._fill, args=args, name="kv memory", daemon=True)
            self._thread.start()

    def _fill(self, allocate: Allocate, num_blocks: Sequence[int]) -> None:
        """Allocates all slabs, the groups in turn. Without more memory the tier stays as it is."""
        try:
            for i in itertools.count():
                left = False
                for g, (per_slab, count) in enumerate(zip(self._per_slab, num_blocks, strict=True)):
                    blocks = min(per_slab, count - i * per_slab)
                    if blocks > 0 and not self._stopped:
                        slab = allocate(blocks * self._block_bytes[g])
                        with self._changed:
                            self._slabs[g].append(slab)
                            self._changed.notify_all()
                        left = True
                if not left:
                    return
        except Exception:
            log.exception("the host tier gets no more memory and stays smaller than it was asked to be")
            self.stop_waiting()

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        epoch = self._epoch
        self._keys[group].pop(block, None)
        fill(self._memory(group, block))
        self._keys[group][block] = key, epoch

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        if self._keys[group].get(block) != (key, self._epoch):
            raise StoreError("the host tier does not hold the block", where=f"group {group}, block {block}")
        use(self._memory(group, block))

    def _memory(self, group: int, block: int) -> Bytes:
        """Of a block; waits until it is allocated."""
        slab, at = divmod(block, self._per_slab[group])
        slabs, nbytes = self._slabs[group], self._block_bytes[group]
        if slab >= len(slabs):
            with self._changed:
                self._changed.wait_for(lambda: slab < len(slabs) or self._stopped)
            if slab >= len(slabs):
                raise StoreError("the host tier has no memory for the block", where=f"group {group}")
        return slabs[slab][at * nbytes : (at + 1) * nbytes]

    def forget(self, group: int, block: int) -> None:
        self._keys[group].pop(block, None)

    def reset(self) -> None:
        self._epoch += 1

    def stop_waiting(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        self.stop_waiting()
        if self._thread is not None:
            self._thread.join()
        self._slabs = []


def reserve(nbytes: int) -> Bytes:
    """Memory that is aligned to pages and taken from the system when it is first written: [nbytes] uint8.

    Raises ConfigError.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            "cannot reserve memory for the host tier",
            expected=f"{nbytes / 2**20:.0f} MiB",
            got=str(error),
            remedy="lower kv_offload",
        ) from None
    return np.frombuffer(memory, np.uint8, nbytes)
