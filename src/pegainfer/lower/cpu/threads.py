"""How many threads, and the pool that runs them."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from pegainfer.contract.errors import ConfigError
from pegainfer.kernels.cpu.library import library
from pegainfer.runtime.control_groups import CGROUP, OWN, control_groups

SPIN_US = 50  # how long an idle thread spins before it sleeps: about the cost of waking it


def usable_cores(cgroup: Path = CGROUP, own: Path = OWN) -> int:
    """Cores that this process may keep busy: its affinity mask, within its control groups' quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(group) for group in control_groups("cpu", cgroup, own)]
    return max(1, min([cores, *(int(q) for q in quotas if q is not None)]))


def _quota(group: Path) -> float | None:
    """Cores that one control group grants (version 2, then 1); None: no limit."""
    try:
        limit, period = (group / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        limit = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


class ThreadPool:
    """Threads that executors share. One executor may run at a time.

    Args:
        threads: with the one that calls `run`; 0: as many as there are usable cores.
    """

    def __init__(self, threads: int = 0) -> None:
        if threads < 0 or threads > 1024:
            raise ConfigError("number of threads", expected="1 to 1024, or 0 for all cores", got=threads)
        self.threads = threads or usable_cores()
        lib = library()
        handle = lib.pega_pool_create(self.threads, SPIN_US)
        if handle is None:
            raise ConfigError("the system gives no more threads", got=self.threads, remedy="ask for fewer")
        self.handle: int = handle
        self._finalizer = weakref.finalize(self, lib.pega_pool_destroy, handle)
        self._finalizer.atexit = False  # a step may be running when the process ends

    def close(self) -> None:
        """Ends the threads; idempotent. No executor may run after it."""
        self._finalizer()
