"""Where a tier keeps blocks: the interface of all kinds, and host memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from pegainfer.contract.errors import ConfigError, PegaError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Use = Callable[[Bytes], None]  # reads or fills the content of one block: [nbytes] uint8


class StoreError(PegaError):
    """A tier does not have the wanted block, or cannot keep one. The block is then computed again."""


class BlockStore(Protocol):
    """One tier's memory. Calls for different blocks may come from several threads at once.

    The scheduler's bookkeeping ensures that no block is written while another call uses it.
    """

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        """Keeps under `key` what `fill` puts into the buffer that it is given.

        Raises StoreError; the block then holds nothing.
        """

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        """Gives `use` the content that was kept under `key`. Raises StoreError for anything else."""

    def reset(self) -> None:
        """Forgets all blocks. What is being written meanwhile is not kept either."""

    def close(self) -> None:
        """Releases memory and files. No call is in progress."""


class HostStore:
    """Blocks in the memory of this process.

    Memory is reserved at start and taken from the system only as blocks are first written.
    """

    def __init__(self, block_bytes: Sequence[int], num_blocks: Sequence[int]) -> None:
        """
        Args:
            block_bytes, num_blocks: by KV group.

        Raises ConfigError where the system does not reserve so much.
        """
        self._groups = [reserve(n * count, n) for n, count in zip(block_bytes, num_blocks, strict=True)]
        self._keys: list[dict[int, tuple[bytes, int]]] = [{} for _ in block_bytes]  # block -> key, epoch
        self._epoch = 0

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        epoch = self._epoch
        self._keys[group].pop(block, None)
        fill(self._groups[group][block])
        self._keys[group][block] = key, epoch

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        if self._keys[group].get(block) != (key, self._epoch):
            raise StoreError("the host tier does not hold the block", where=f"group {group}, block {block}")
        use(self._groups[group][block])

    def reset(self) -> None:
        self._epoch += 1

    def close(self) -> None:
        self._groups = []


def reserve(nbytes: int, block_bytes: int) -> Bytes:
    """Memory for blocks, [blocks, block_bytes], aligned to pages. Raises ConfigError."""
    try:
        memory = mmap.mmap(-1, max(1, nbytes))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            "cannot reserve memory for the host tier",
            expected=f"{nbytes / 2**20:.0f} MiB",
            got=str(error),
            remedy="lower kv_offload",
        ) from None
    return np.frombuffer(memory, np.uint8, nbytes).reshape(-1, block_bytes)
