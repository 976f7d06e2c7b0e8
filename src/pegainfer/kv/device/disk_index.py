"""Which blocks a disk tier holds: one file of fixed entries a KV group, mapped into memory.

A store into a shared mapping survives the death of the process, so an entry costs no system call. An entry is
cleared before its record is overwritten and set once the record is complete. Its checksum tells a torn entry;
after a power failure, the record's own checksum tells an entry whose record was lost.
"""

from __future__ import annotations

import itertools
import mmap
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ENTRY = np.dtype(
    [
        ("key", "V32"),
        ("used", "<u8"),  # counts up with every write and read; the lowest is the longest unused
        ("checksum", "<u4"),  # CRC-32 of block number and key; 0: the block holds nothing
        ("unused", "V20"),
    ]
)


class DiskIndex:
    """The entries of one group, by block. Calls for different blocks may come from several threads."""

    def __init__(self, path: Path, num_blocks: int, mode: int) -> None:
        """Opens or makes the file, with room for exactly `num_blocks`. Raises OSError."""
        nbytes = max(1, num_blocks) * ENTRY.itemsize
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)  # a store into a hole of a full disk would kill the process
            self._memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._entries: np.ndarray[Any, Any] = np.frombuffer(self._memory, ENTRY, num_blocks)
        self._clock = itertools.count(int(self._entries["used"].max(initial=0)) + 1)

    def clear(self, block: int) -> None:
        """The block holds nothing from now on."""
        self._entries["checksum"][block] = 0

    def clear_all(self) -> None:
        """No block holds anything, also after a power failure."""
        self._entries["checksum"] = 0
        self._memory.flush()

    def set(self, block: int, key: bytes) -> None:
        """The block's record is complete."""
        self._entries[block] = (key, next(self._clock), _checksum(block, key), b"")

    def holds(self, block: int, key: bytes) -> bool:
        """Whether the block's record is complete and of this key."""
        entry = self._entries[block]
        return bool(entry["checksum"] == _checksum(block, key) and entry["key"].tobytes() == key)

    def touch(self, block: int) -> None:
        """The block was read."""
        self._entries["used"][block] = next(self._clock)

    def stored(self) -> list[tuple[int, bytes]]:
        """(block, key) of the complete entries, the longest unused first; each key once."""
        entries = self._entries
        newest: dict[bytes, tuple[int, int]] = {}  # key -> used, block
        for block in np.flatnonzero(entries["checksum"]).tolist():
            key, used = entries["key"][block].tobytes(), int(entries["used"][block])
            if int(entries["checksum"][block]) == _checksum(block, key):
                newest[key] = max(newest.get(key, (0, 0)), (used, block))
        return [(block, key) for key, (_, block) in sorted(newest.items(), key=lambda item: item[1])]

    def close(self) -> None:
        del self._entries
        self._memory.close()


def _checksum(block: int, key: bytes) -> int:
    return zlib.crc32(block.to_bytes(8, "little"), zlib.crc32(key)) or 1
