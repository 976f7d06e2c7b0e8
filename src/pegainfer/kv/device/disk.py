"""A disk tier: records with checksums in one file a KV group, beside an index that survives a crash.

    DIR/lock          held while an engine uses the folder
    DIR/tier.json     what the records are of; a folder with other content is emptied
    DIR/0.blocks      records of group 0, one at each multiple of the record size
    DIR/0.index       which of them are complete (disk_index.py)

A record is a header (magic, size, CRC-32, digest, key) and the block's content, padded to whole sectors.
Everything in the header is compared with what the reader expects, so that a record of another model, another
layout, another prefix, or one that was written in part, is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.disk_index import DiskIndex
from pegainfer.kv.device.store import Allocate, Bytes, StoreError, Use, reserve

log = logging.getLogger(__name__)

Call = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev

FORMAT = 1  # of the folder; raised with every change of index or records
MAGIC = b"pegaKV01"
HEADER = struct.Struct("<8sQI32s32s")  # magic, bytes of content, CRC-32 of content, digest, key
SECTOR = 4096  # bytes; O_DIRECT wants offsets, sizes and addresses that are multiples of it
MODE = 0o600  # records hold what prompts consist of


def record_bytes(block_bytes: int) -> int:
    """Bytes of the file that a block takes."""
    return -(-(HEADER.size + block_bytes) // SECTOR) * SECTOR


class DiskStore:
    """Implements BlockStore. One engine a folder: a lock keeps others out until `close`."""

    buffered = True

    def __init__(
        self,
        folder: Path,
        digest: bytes,
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        allocate: Allocate = reserve,
    ) -> None:
        """Opens a folder, or makes it.

        Args:
            digest: 32 bytes that say of which model, weights, formats and shard the blocks are.
            block_bytes, num_blocks: by KV group.
            allocate: makes the buffers that records pass through, aligned to pages.

        Raises ConfigError where the folder cannot be used.
        """
        self._digest = digest
        self._block_bytes = block_bytes
        self._files: list[_Records] = []
        self._indices: list[DiskIndex] = []
        self._epoch = 0
        self._lock = threading.Lock()  # between the end of a write and `reset`
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = _take_lock(folder)
            try:
                _claim(folder, {"format": FORMAT, "digest": digest.hex(), "block_bytes": list(block_bytes)})
                for g, (nbytes, count) in enumerate(zip(block_bytes, num_blocks, strict=True)):
                    self._indices.append(DiskIndex(folder / f"{g}.index", count, MODE))
                    self._files.append(
                        _Records(folder / f"{g}.blocks", record_bytes(nbytes), count, allocate)
                    )
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise ConfigError(
                "cannot use the folder of the disk tier",
                expected="a folder on a local disk with some MiB free",
                got=str(error),
                where=str(folder),
            ) from None

    def stored(self) -> tuple[tuple[tuple[int, bytes], ...], ...]:
        """For each group (block, key) of the complete records, the longest unused first."""
        return tuple(tuple(index.stored()) for index in self._indices)

    def write(self, group: int, block: int, key: bytes, fill: Use) -> None:
        epoch, index = self._epoch, self._indices[group]
        index.clear(block)
        with self._files[group].buffer() as record:
            content = record[HEADER.size : HEADER.size + self._block_bytes[group]]
            fill(content)
            record[: HEADER.size] = np.frombuffer(self._header(content, key), np.uint8)
            self._files[group].write(block, record)
        with self._lock:
            if epoch != self._epoch:
                raise StoreError("the prefix cache was reset meanwhile")
            index.set(block, key)

    def read(self, group: int, block: int, key: bytes, use: Use) -> None:
        if not self._indices[group].holds(block, key):
            raise StoreError("the disk tier does not hold the block", where=f"group {group}, block {block}")
        with self._files[group].buffer() as record:
            self._files[group].read(block, record)
            content = record[HEADER.size : HEADER.size + self._block_bytes[group]]
            if bytes(record[: HEADER.size]) != self._header(content, key):
                self._indices[group].clear(block)
                raise StoreError(
                    "a record of the disk tier is corrupt, or of another prefix",
                    where=f"group {group}, block {block}",
                )
            use(content)
        self._indices[group].touch(block)

    def forget(self, group: int, block: int) -> None:
        self._indices[group].clear(block)

    def stop_waiting(self) -> None:
        """Nothing waits."""

    def reset(self) -> None:
        with self._lock:
            self._epoch += 1
            for index in self._indices:
                index.clear_all()
        for file in self._files:
            file.empty()

    def close(self) -> None:
        for file in self._files:
            file.close()
        for index in self._indices:
            index.close()
        os.close(self._held)

    def _header(self, content: Bytes, key: bytes) -> bytes:
        checksum = zlib.crc32(content.data)
        return HEADER.pack(MAGIC, len(content), checksum, self._digest, key)


class _Records:
    """A file of records of equal size. Reads and writes pass by the page cache where the system allows it."""

    def __init__(self, path: Path, nbytes: int, count: int, allocate: Allocate) -> None:
        """Raises OSError. Records beyond `count` are cut off."""
        self._path = path
        self._nbytes = nbytes
        self._allocate = allocate
        self._spare: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._fd = self._open(os.O_DIRECT)
        if os.fstat(self._fd).st_size > nbytes * count:
            os.ftruncate(self._fd, nbytes * count)

    def _open(self, direct: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(self._path, flags | direct, MODE)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            log.warning("%s: the file system has no O_DIRECT, the page cache is used", self._path)
            return os.open(self._path, flags, MODE)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """Memory for one record, [nbytes] uint8, aligned as O_DIRECT wants it."""
        try:
            record = self._spare.get_nowait()
        except queue.Empty:
            record = self._allocate(self._nbytes)
        try:
            yield record
        finally:
            self._spare.put(record)

    def read(self, block: int, record: Bytes) -> None:
        """Raises StoreError."""
        self._all("read", os.preadv, block, record)

    def write(self, block: int, record: Bytes) -> None:
        """Raises StoreError, as where the disk is full."""
        self._all("written", os.pwritev, block, record)

    def _all(self, what: str, call: Call, block: int, record: Bytes) -> None:
        at = block * self._nbytes
        try:
            try:
                done = call(self._fd, [record.data], at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._leave_direct():
                    raise
                done = call(self._fd, [record.data], at)
        except OSError as error:
            raise StoreError(
                f"a record of the disk tier could not be {what}", got=str(error), where=str(self._path)
            ) from None
        if done != self._nbytes:
            raise StoreError(
                f"a record of the disk tier was {what} in part",
                expected=f"{self._nbytes} bytes", got=done, where=str(self._path),
            )  # fmt: skip

    def _leave_direct(self) -> bool:
        """Goes on without O_DIRECT, which some file systems refuse only at its use; False if it is off."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            log.warning("%s: the file system refuses O_DIRECT, the page cache is used", self._path)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def empty(self) -> None:
        """Gives the disk's space back."""
        with contextlib.suppress(OSError):  # the index says already that nothing is there
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        os.close(self._fd)


def _take_lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock. Raises OSError; ConfigError where another engine has it."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(
            "another engine uses the folder of the disk tier",
            where=str(folder),
            remedy="give each engine a folder of its own in kv_offload_disk",
        ) from None
    return fd


def _claim(folder: Path, content: dict[str, object]) -> None:
    """Empties the folder where its records are of other content, and writes what they are of.

    Raises OSError.
    """
    path = folder / "tier.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        found = None
    if found == content:
        return
    if found is not None:
        log.warning("%s holds blocks of another model or format, which are removed", folder)
    for old in (*folder.glob("*.blocks"), *folder.glob("*.index")):
        if old.stem.isdigit():
            old.unlink()
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
