"""What ranks on GPUs tell each other, with a driver whose memory is this process's."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pegainfer.contract.errors import ConfigError, PeerFailedError
from pegainfer.runtime import rank_memory
from pegainfer.runtime.cuda.arguments import CONTROL
from pegainfer.runtime.cuda.layout import packing
from pegainfer.runtime.cuda.peers import Peers
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.rank_memory import SLOT_BYTES, RankMemory
from tests.support.fake_cuda import FakeCuda, fake_cuda


def control(peers: Peers) -> dict[str, int]:
    """The struct that kernels read; peers' addresses as `peer0` …"""
    names = [f.name for f in CONTROL.fields if f.inner is None]
    names += [f"peer{i}" for i in range(len(CONTROL.kinds) - len(names))]
    values = struct.unpack(packing(CONTROL.kinds), ctypes.string_at(peers.control, CONTROL.size))
    return dict(zip(names, values, strict=True))


@contextmanager
def group(ranks: int, seconds: float = 60.0) -> Iterator[list[RankMemory]]:

    first = RankMemory.create(ranks, seconds)
    memories = [first, *(RankMemory(os.dup(first.fd), rank, ranks, seconds) for rank in range(1, ranks))]
    try:
        yield memories
    finally:
        for memory in memories:
            memory.close()


def test_ranks_map_each_other_s_memory_in_the_order_of_the_ranks() -> None:
    with fake_cuda(FakeCuda()) as fake, group(3, seconds=2.5) as memories:
        peers = [Peers(memory) for memory in memories]
        before = [control(p) for p in peers]
        assert [(c["alone"], c["rank"], c["count"], c["peer0"]) for c in before] == [
            (1, 0, 3, 0), (1, 1, 3, 0), (1, 2, 3, 0),
        ]  # fmt: skip
        threads = [threading.Thread(target=p.connect, args=(Stream(),)) for p in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = [control(p) for p in peers]
        bases = [[c[f"peer{i}"] for i in range(3)] for c in after]
        assert bases[0] == bases[1] == bases[2]
        assert len(set(bases[0])) == 3
        for rank, c in enumerate(after):
            assert (c["alone"], c["rank"], c["count"], c["peer3"]) == (0, rank, 3, 0)
            assert c["limit"] == 2_500_000_000
            assert ctypes.c_int32.from_address(c["failed"]).value == 0
        memories[1].fail(2)
        assert [ctypes.c_int32.from_address(c["failed"]).value for c in after] == [3, 3, 3]
        with pytest.raises(PeerFailedError, match="rank 2 of 3 has failed"):
            peers[0].check()
        for p in peers:
            p.close()
        assert fake.calls["cuIpcCloseMemHandle"] == 6
        assert fake.calls["cuMemHostUnregister"] == 3


def test_what_runs_alone_is_marked_on_the_stream() -> None:
    with fake_cuda(), group(2) as memories:
        peers = [Peers(memory) for memory in memories]
        stream = Stream()
        with peers[0].alone(stream):
            assert control(peers[0])["alone"] != 0
        assert control(peers[0])["alone"] != 0, "the others are not there yet"
        threads = [threading.Thread(target=p.connect, args=(stream,)) for p in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with peers[0].alone(stream):
            assert control(peers[0])["alone"] != 0
            assert control(peers[1])["alone"] == 0
        assert control(peers[0])["alone"] == 0


def test_a_rank_that_fails_while_others_wait_for_its_word_is_named() -> None:
    with group(2) as memories:
        memories[1].fail(1)
        with pytest.raises(PeerFailedError, match="rank 1 of 2 has failed"):
            memories[0].exchange(b"here")


def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_memory, "START_SECONDS", 0.05)
    with group(3) as memories:
        rank_memory._put(memories[1]._map, rank_memory._slots_start(3) + SLOT_BYTES, b"here")
        with pytest.raises(PeerFailedError, match="rank 2 of 3 is not ready"):
            memories[0].exchange(b"here")


def test_there_are_not_more_ranks_than_the_kernels_take() -> None:
    with fake_cuda(), group(9) as memories, pytest.raises(ConfigError, match="at most 8; got 9"):
        Peers(memories[0])
