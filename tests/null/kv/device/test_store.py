"""Stores of tiers: what was kept comes back or is a miss, whatever happened to files and processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device import disk
from pegainfer.kv.device.disk import HEADER, DiskStore, record_bytes
from pegainfer.kv.device.store import BlockStore, Bytes, HostStore, StoreError

KILLS = int(os.environ.get("TIER_KILLS", "3"))  # processes that are killed while they write
SIZES, BLOCKS = (5000, 300), (6, 3)  # bytes of a block and blocks, by group
DIGEST = bytes(range(32))


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def content(n: int, nbytes: int) -> Bytes:
    """What the block with this key holds."""
    return np.random.default_rng(n).integers(0, 256, nbytes, np.uint8)


def put(store: BlockStore, g: int, block: int, n: int) -> None:
    def fill(out: Bytes) -> None:
        out[:] = content(n, len(out))

    store.write(g, block, key(n), fill)


def get(store: BlockStore, g: int, block: int, n: int) -> None:
    """Raises StoreError for a miss; anything else than what was kept is an error of the test."""
    seen: list[bool] = []
    store.read(g, block, key(n), lambda data: seen.append(bool((data == content(n, len(data))).all())))
    assert seen == [True]


def open_disk(folder: Path, digest: bytes = DIGEST, blocks: tuple[int, ...] = BLOCKS) -> DiskStore:
    return DiskStore(folder, digest, SIZES, blocks)


def make(kind: str, tmp_path: Path) -> BlockStore:
    return HostStore(SIZES, BLOCKS) if kind == "host" else open_disk(tmp_path)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_was_kept_comes_back_under_its_key_alone(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    put(store, 0, 5, 1)
    put(store, 1, 0, 2)
    get(store, 0, 5, 1)
    get(store, 1, 0, 2)
    put(store, 0, 5, 3)
    get(store, 0, 5, 3)
    for g, block, n in ((0, 5, 1), (1, 0, 1), (0, 0, 1), (1, 2, 2)):
        with pytest.raises(StoreError):
            get(store, g, block, n)
    store.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_reset_forgets_all_and_what_is_being_written(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path)
    put(store, 0, 0, 1)

    def fill(out: Bytes) -> None:
        out[:] = 7
        store.reset()

    with contextlib.suppress(StoreError):
        store.write(0, 1, key(2), fill)
    for block, n in ((0, 1), (1, 2)):
        with pytest.raises(StoreError):
            get(store, 0, block, n)
    put(store, 0, 1, 3)
    get(store, 0, 1, 3)
    store.close()


def test_a_disk_tier_outlives_its_process_with_the_longest_unused_first(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    for block in range(4):
        put(store, 0, block, 10 + block)
    put(store, 1, 2, 20)
    get(store, 0, 0, 10)  # used last
    store.close()
    store = open_disk(tmp_path)
    assert store.stored() == (((1, key(11)), (2, key(12)), (3, key(13)), (0, key(10))), ((2, key(20)),))
    get(store, 0, 3, 13)
    store.close()


def test_a_smaller_tier_keeps_what_it_has_room_for(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    for block in range(6):
        put(store, 0, block, block)
    store.close()
    store = open_disk(tmp_path, blocks=(2, 1))
    assert store.stored() == (((0, key(0)), (1, key(1))), ())
    assert (tmp_path / "0.blocks").stat().st_size == 2 * record_bytes(SIZES[0])
    store.close()


def test_blocks_of_another_model_are_a_miss(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, 0, 0, 1)
    store.close()
    other = open_disk(tmp_path, digest=bytes(32))
    assert other.stored() == ((), ())
    with pytest.raises(StoreError):
        get(other, 0, 0, 1)
    other.close()


def test_a_record_of_another_model_is_a_miss_even_where_the_index_names_it(tmp_path: Path) -> None:
    for name, digest in (("a", DIGEST), ("b", bytes(32))):
        store = open_disk(tmp_path / name, digest)
        put(store, 0, 0, 1)
        store.close()
    (tmp_path / "a" / "0.blocks").replace(tmp_path / "b" / "0.blocks")
    store = open_disk(tmp_path / "b", bytes(32))
    assert store.stored()[0] == ((0, key(1)),)
    with pytest.raises(StoreError, match="corrupt"):
        get(store, 0, 0, 1)
    store.close()


@pytest.mark.parametrize("place", [0, HEADER.size - 1, HEADER.size, HEADER.size + SIZES[0] - 1])
def test_a_flipped_bit_is_a_miss_once_and_forever(place: int, tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, 0, 1, 1)
    with open(tmp_path / "0.blocks", "r+b") as file:
        file.seek(record_bytes(SIZES[0]) + place)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(StoreError, match="corrupt"):
        get(store, 0, 1, 1)
    store.close()
    store = open_disk(tmp_path)
    assert store.stored() == ((), ())
    store.close()


def test_a_file_that_was_cut_off_is_a_miss(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    put(store, 0, 0, 1)
    put(store, 0, 1, 2)
    os.truncate(tmp_path / "0.blocks", record_bytes(SIZES[0]) + 4096)
    get(store, 0, 0, 1)
    with pytest.raises(StoreError, match="in part"):
        get(store, 0, 1, 2)
    store.close()


def test_damaged_indices_and_descriptions_are_misses(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    for block in range(3):
        put(store, 0, block, block + 1)
    store.close()
    with open(tmp_path / "0.index", "r+b") as file:
        file.seek(64 + 3)  # in the key of block 1
        file.write(b"x")
    store = open_disk(tmp_path)
    assert store.stored()[0] == ((0, key(1)), (2, key(3)))
    store.close()
    (tmp_path / "tier.json").write_bytes(b"{")
    store = open_disk(tmp_path)
    assert store.stored() == ((), ())
    store.close()


def test_a_full_disk_is_a_miss_and_the_store_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    store = open_disk(tmp_path)
    put(store, 0, 0, 1)
    write = os.pwritev

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def short(fd: int, buffers: Any, offset: int) -> int:
        return write(fd, [buffers[0][:4096]], offset)

    calls: tuple[Callable[..., int], ...] = (full, short)
    for call in calls:
        monkeypatch.setattr(disk.os, "pwritev", call)
        with pytest.raises(StoreError):
            put(store, 0, 0, 2)
        monkeypatch.setattr(disk.os, "pwritev", write)
        for n in (1, 2):
            with pytest.raises(StoreError):
                get(store, 0, 0, n)
    put(store, 0, 0, 3)
    get(store, 0, 0, 3)
    store.close()


def test_without_o_direct_the_page_cache_serves(tmp_path: Path, monkeypatch: Any) -> None:
    read = os.preadv
    refused = []

    def refuse(fd: int, buffers: Any, offset: int) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(fd, buffers, offset)

    store = open_disk(tmp_path)
    put(store, 0, 0, 1)
    monkeypatch.setattr(disk.os, "preadv", refuse)
    if store._files[0]._leave_direct():  # the test's file system takes it
        flags = fcntl.fcntl(store._files[0]._fd, fcntl.F_GETFL)
        fcntl.fcntl(store._files[0]._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        get(store, 0, 0, 1)
        assert refused
        assert not fcntl.fcntl(store._files[0]._fd, fcntl.F_GETFL) & os.O_DIRECT
    else:
        with pytest.raises(StoreError):
            get(store, 0, 0, 1)
    get(store, 0, 0, 1)
    store.close()


def test_one_engine_a_folder(tmp_path: Path) -> None:
    store = open_disk(tmp_path)
    with pytest.raises(ConfigError, match="another engine"):
        open_disk(tmp_path)
    store.close()
    open_disk(tmp_path).close()


def test_files_are_for_their_owner_alone_and_others_in_the_folder_stay(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    (folder / "notes.index").write_text("mine")
    (folder / "README").write_text("mine")
    store = open_disk(folder)
    put(store, 0, 0, 1)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    assert modes.pop("notes.index") == modes.pop("README") == (0o666 & ~_umask())
    assert modes == dict.fromkeys(["lock", "tier.json", "0.index", "0.blocks", "1.index", "1.blocks"], 0o600)
    store.close()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="folder of the disk tier"):
        open_disk(tmp_path / "file")


def write_forever(folder: str, seed: str) -> None:
    """Writes, reads and overwrites until the process is killed; says on stdout when the first is complete."""
    r = random.Random(int(seed))
    store = open_disk(Path(folder))
    held = {block: int.from_bytes(k, "little") for block, k in store.stored()[0]}
    while True:
        block = r.randrange(BLOCKS[0])
        n = int(seed) * 100_000 + r.randrange(100_000)
        if n not in held.values():
            put(store, 0, block, n)
            held[block] = n
            print(n, flush=True)


def test_a_killed_process_leaves_what_was_complete(tmp_path: Path) -> None:
    """TIER_KILLS=50 in the environment kills more processes."""
    r = random.Random(5)
    before: dict[int, bytes] = {}
    code = f"from {__name__} import write_forever; import sys; write_forever(*sys.argv[1:])"
    for i in range(KILLS):
        command = [sys.executable, "-c", code, str(tmp_path), str(i + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            told = [int(writer.stdout.readline())]
            time.sleep(r.random() * 0.05)
            writer.send_signal(signal.SIGKILL)
            told += [int(line) for line in writer.stdout.read().splitlines() if line]
        store = open_disk(tmp_path)
        stored = dict(store.stored()[0])
        for block, k in stored.items():
            get(store, 0, block, int.from_bytes(k, "little"))
        # Of what the process had finished, all is there but what it had begun to overwrite.
        lost = set(before) - set(stored)
        assert len(lost) <= 1 and len(stored) >= 1
        newest = key(told[-1])
        assert newest in stored.values() or lost or len(stored) < BLOCKS[0]
        before = stored
        store.close()
    assert len(before) >= min(BLOCKS[0] - 1, KILLS)
