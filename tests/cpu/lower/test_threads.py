"""Thread counts from the system, and a pool that gives right results however it is pressed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.threads import ThreadPool, usable_cores
from pegainfer.runtime.priority import at_low_priority
from pegainfer.runtime.worker import Worker
from tests.cpu.kernels.model import Model, Span

AFFINITY = len(os.sched_getaffinity(0))
TASKS = Path("/proc/self/task")  # this process's threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "250000 100000\n"}, min(2, AFFINITY)),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, AFFINITY),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, AFFINITY),
        ({"cpu.max": "nonsense"}, AFFINITY),
        ({"cpu.max": "1 0"}, AFFINITY),
        ({}, AFFINITY),
        # A service in a slice: its own quota, that of the slice, and none of another's.
        ({"own": "0::/a.slice/b.service\n", "a.slice/b.service/cpu.max": "100000 100000"}, 1),
        ({"own": "0::/a.slice/b.service\n", "a.slice/cpu.max": "100000 100000"}, 1),
        ({"own": "0::/a.slice\n", "a.slice/b.service/cpu.max": "100000 100000"}, AFFINITY),
        (
            {
                "own": "4:memory:/m\n2:cpu,cpuacct:/c\n",
                "cpu/c/cpu.cfs_quota_us": "100000",
                "cpu/c/cpu.cfs_period_us": "100000",
            },
            1,
        ),
        ({"own": "0::/not/seen/from/here\nnonsense\n"}, AFFINITY),
    ],
)
def test_a_containers_quota_counts(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path, tmp_path / "own") == cores


def test_thread_counts_are_checked() -> None:
    with pytest.raises(ConfigError, match="1 to 1024"):
        ThreadPool(-1)
    assert ThreadPool().threads == usable_cores()


def test_more_threads_than_cores_for_many_steps() -> None:
    """Steps of a few microseconds, so that threads meet at every stage of claiming, ending and sleeping."""
    span = Span(np.array([1], np.int32), np.array([0]), 0, 1)
    want = Model(CpuOptions(threads=1)).logits([span]).tobytes()
    for threads in (2, 7):
        model = Model(CpuOptions(threads=threads))
        assert all(model.logits([span]).tobytes() == want for _ in range(300))


def test_pools_end_and_start_again() -> None:
    before = len(list(TASKS.iterdir()))
    for _ in range(20):
        pool = ThreadPool(3)
        pool.close()
        pool.close()
    assert len(list(TASKS.iterdir())) <= before  # fewer where a pool of another test was collected meanwhile


def test_an_engine_that_was_loaded_at_a_low_priority_computes_at_the_usual_one() -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    before = {task.name for task in TASKS.iterdir()}
    backend, worker = at_low_priority(lambda: (CpuBackend({}, CpuOptions(threads=3)), Worker("computes")))
    for _ in range(500):
        started = [int(task.name) for task in TASKS.iterdir() if task.name not in before]
        if len(started) == 3:  # two beside the caller of the pool, and the worker
            break
        time.sleep(0.01)  # the thread of the work itself is still on its way out
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in started} == {usual}
    assert len(started) == 3
    worker.close()
    backend.close()
