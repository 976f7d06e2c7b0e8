"""Work that leaves the processor to others while they want it."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Job = Callable[[], None]

# Beside a thread of usual priority it gets a fifteenth of a core, so that this one is delayed by 7% at most.
NICE = 12
LOWEST = 19  # the lowest priority that there is

# `jobs`: a queue of calls that the thread in `at_low_priority` runs for this thread, at its own priority.
_caller = threading.local()


def at_low_priority(work: Callable[[], T], nice: int = NICE) -> T:
    """Runs it on a thread of its own, and returns or raises what it does.

    Threads that the work starts inherit its priority and keep it: raising a priority needs privileges.
    Start threads that outlive the work by `at_usual_priority`.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def run() -> None:
        thread_id = threading.get_native_id()  # on Linux threads have priorities of their own
        before = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(before + nice, LOWEST))
        _caller.jobs = jobs
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            jobs.put(None)

    thread = threading.Thread(target=run, name="low-priority")
    thread.start()
    while (job := jobs.get()) is not None:
        job()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def at_usual_priority(start: Callable[[], T]) -> T:
    """Returns or raises what `start` does; threads that it starts have the priority of the process.

    Within the work of `at_low_priority`, the thread that called `at_low_priority` runs `start`. Anywhere else
    it is called directly.
    """
    jobs: queue.SimpleQueue[Job | None] | None = getattr(_caller, "jobs", None)
    if jobs is None:
        return start()
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def job() -> None:
        try:
            results.append(start())
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    jobs.put(job)
    ended.wait()
    if errors:
        raise errors[0]
    return results[0]
