"""How many threads, and the pool that runs them."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from pegainfer.contract.errors import ConfigError
from pegainfer.kernels.cpu.library import library

CGROUP = Path("/sys/fs/cgroup")
SPIN_US = 50  # how long an idle thread spins before it sleeps: about the cost of waking it


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may keep busy: its affinity mask, less what a container's quota allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores that the control group grants (version 2, then 1); None: no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
        period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
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
