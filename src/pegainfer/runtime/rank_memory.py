"""Memory that all ranks of a group on one machine share. Ranks on the CPU pass sums through it.

kernels/cpu/csrc/ranks.h reads and writes it; ranks on GPUs share only the word that says who failed, and tell
each other where their GPUs' memory lies (`exchange`). It has no name: ranks inherit a file descriptor, so
nothing is left behind however a rank ends, and its pages take memory only once they are written.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import tempfile
import time
import zlib

from pegainfer.contract.errors import ConfigError, PeerFailedError

LINE = 64  # bytes: the word that says who failed, then a line for each rank
PAGE = 4096  # bytes: the slots begin at a multiple of it
SLOT_BYTES = 4 << 20  # what a rank passes to the others at once; more goes in several rounds
SLOTS = 2  # a rank writes one while others may still read the other
WAIT_SECONDS = 60.0  # for a rank that does not join a sum; a step takes seconds at most
START_SECONDS = 600.0  # for a rank that loads its part of the model
MAX_RANKS = 64
_HEAD = struct.Struct("=II")  # of what a rank tells the others: bytes, CRC


class RankMemory:
    """One rank's mapping. `fail` may be called from any thread at any time.

    Args:
        fd: of the memory, taken over.
        rank: in [0, ranks).
        seconds: how long to wait for the other ranks.
    """

    def __init__(self, fd: int, rank: int, ranks: int, seconds: float = WAIT_SECONDS) -> None:
        self.fd, self.rank, self.ranks, self.seconds = fd, rank, ranks, seconds
        self._map = mmap.mmap(fd, _nbytes(ranks))
        self._failed: ctypes.c_int32 | None = ctypes.c_int32.from_buffer(self._map)

    @classmethod
    def create(cls, ranks: int, seconds: float = WAIT_SECONDS) -> RankMemory:
        """New memory, as rank 0 sees it. Raises ConfigError."""
        if not 2 <= ranks <= MAX_RANKS:
            raise ConfigError("number of ranks on one machine", expected=f"2 to {MAX_RANKS}", got=ranks)
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("pegainfer-ranks")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _nbytes(ranks))
        return cls(fd, 0, ranks, seconds)

    @property
    def address(self) -> int:
        """Of the mapping, until `close`."""
        assert self._failed is not None
        return ctypes.addressof(self._failed)

    def fail(self, rank: int) -> None:
        """Ends the group's steps, now and from here on, because of a rank. The first call counts."""
        failed = self._failed
        if failed is not None and not failed.value:
            failed.value = 1 + rank

    @property
    def has_failed(self) -> bool:
        return self._why() != 0

    def check(self) -> None:
        """Raises PeerFailedError, which names the rank, where the group has failed."""
        why = self._why()
        if why > 0:
            raise PeerFailedError(f"rank {why - 1} of {self.ranks} has failed", remedy="restart the server")
        if why < 0:
            raise PeerFailedError(
                f"rank {-why - 1} of {self.ranks} does not answer",
                expected=f"its part of a sum within {self.seconds:g} s",
                remedy="restart the server",
            )

    def _why(self) -> int:
        """The word of ranks.h; read here so that a traceback through `check` does not hold the memory."""
        failed = self._failed
        return 0 if failed is None else failed.value

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank says, in their order; every rank calls it once, and returns when all have.

        It takes the slots of the first sum, so ranks on the CPU cannot use it.

        Args:
            data: some bytes, but at most a slot's.

        Raises PeerFailedError where a rank fails, or says nothing within START_SECONDS.
        """
        at = _slots_start(self.ranks)
        end = time.monotonic() + START_SECONDS
        _put(self._map, at + self.rank * SLOT_BYTES, data)
        said: list[bytes] = []
        while len(said) < self.ranks:
            found = _found(self._map, at + len(said) * SLOT_BYTES)
            if found is not None:
                said.append(found)
                continue
            self.check()
            if time.monotonic() > end:
                raise PeerFailedError(
                    f"rank {len(said)} of {self.ranks} is not ready",
                    expected=f"it to be loaded within {START_SECONDS:g} s",
                )
            time.sleep(0.001)
        return said

    def close(self) -> None:
        """Unmaps the memory; executors that use it must not run afterwards. `fail` does nothing then."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._failed = None
            with contextlib.suppress(BufferError):  # `fail` is under way; the mapping goes with this object
                self._map.close()


def _slots_start(ranks: int) -> int:
    return -(-LINE * (1 + ranks) // PAGE) * PAGE


def _nbytes(ranks: int) -> int:
    return _slots_start(ranks) + SLOTS * ranks * SLOT_BYTES


def _put(memory: mmap.mmap, at: int, data: bytes) -> None:
    memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
    memory[at : at + _HEAD.size] = _HEAD.pack(len(data), zlib.crc32(data))


def _found(memory: mmap.mmap, at: int) -> bytes | None:
    """What `_put` has written; None while it is not there in full, whatever the order of the writes."""
    length, check = _HEAD.unpack(memory[at : at + _HEAD.size])
    data = memory[at + _HEAD.size : at + _HEAD.size + length]
    return data if length and zlib.crc32(data) == check else None
