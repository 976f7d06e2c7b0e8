"""Sums over ranks, each a process, on one GPU and on one GPU each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pegainfer.runtime.cuda.driver import call, probe
from pegainfer.runtime.rank_memory import RankMemory

SECONDS = 240.0


def gpus() -> int:
    """GPUs of this machine. Skips the test without one."""
    if (reason := probe()) is not None:
        pytest.skip(reason)
    return int(call("cuDeviceGetCount"))


@contextmanager
def group(
    ranks: int, shared: bool, mode: str, wait: float
) -> Iterator[tuple[RankMemory, list[subprocess.Popen[str]]]]:
    """Starts the ranks of a group; none is left."""
    count = gpus()
    if not shared and count < ranks:
        pytest.skip(f"{ranks} GPUs are needed, there are {count}")
    memory = RankMemory.create(ranks)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.ranks.worker", *map(str, (memory.fd, rank, ranks)),
             str(0 if shared else rank), str(wait), mode, "7"],
            pass_fds=(memory.fd,), stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        yield memory, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        memory.close()


WHERE = pytest.mark.parametrize("shared", [True, False], ids=["one GPU", "a GPU each"])


@WHERE
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(ranks: int, shared: bool) -> None:
    with group(ranks, shared, "sums", 60.0) as (_, processes):
        said = [process.communicate(timeout=SECONDS)[0].strip() for process in processes]
    assert said == ["right"] * ranks


@WHERE
def test_a_rank_that_is_gone_ends_the_sum(shared: bool) -> None:
    with group(2, shared, "quits", 2.0) as (_, processes):
        said = [process.communicate(timeout=SECONDS)[0].strip() for process in processes]
    assert said[0].startswith("PeerFailedError: rank 1 of 2 does not answer"), said


@WHERE
def test_a_failure_that_the_host_reports_ends_the_sum_at_once(shared: bool) -> None:
    with group(2, shared, "waits", 120.0) as (memory, processes):
        first = processes[0]
        assert first.stdout is not None
        assert first.stdout.readline().strip() == "waiting"
        time.sleep(0.2)
        assert first.poll() is None, "it waits"
        memory.fail(1)
        assert first.communicate(timeout=20.0)[0].startswith("PeerFailedError: rank 1 of 2 has failed")
