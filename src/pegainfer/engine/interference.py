"""What takes time from the engine beside its own work: garbage collection, and other processes."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = Path("/proc/self/task")
MAX_THREADS = 32  # that are watched: a reading takes some 2 µs each


class CollectorTime:
    """Sums the seconds that Python's garbage collector takes while it is watched."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = 0.0
        self.seconds = 0.0

    def watch(self, on: bool) -> None:
        """Begins or ends watching."""
        if on:
            gc.callbacks.append(self._note)
        else:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = self._clock()
        elif self._began:
            self.seconds += self._clock() - self._began
            self._began = 0.0


class ProcessorWait:
    """How long threads of this process could have run, but had no processor; Linux counts that (schedstat).

    Knows the threads that exist when `watch` begins. Knows nothing where the kernel does not count.
    """

    def __init__(self, threads: Path = THREADS) -> None:
        self._threads = threads
        self._files: list[int] = []
        self._before: list[int] = []  # nanoseconds, of each thread

    def watch(self, on: bool) -> None:
        """Begins or ends watching."""
        for file in self._files:
            os.close(file)
        self._files = []
        if on:
            for thread in sorted(self._threads.iterdir())[:MAX_THREADS]:
                with contextlib.suppress(OSError):  # the thread has ended, or the kernel does not count
                    self._files.append(os.open(thread / "schedstat", os.O_RDONLY))
        self._before = [_waited(file) for file in self._files]

    def seconds(self) -> float:
        """Since the last call or `watch`, summed over the threads."""
        before, self._before = self._before, [_waited(file) for file in self._files]
        return (sum(self._before) - sum(before)) / 1e9


def _waited(file: int) -> int:
    """Nanoseconds in all; 0 of a thread that has ended."""
    try:
        return int(os.pread(file, 64, 0).split()[1])
    except (OSError, IndexError):
        return 0
