"""Work that leaves the processor to others while they want it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Beside a thread of usual priority it gets a seventh of a core, so that this one is delayed by 17% at most.
NICE = 8
LOWEST = 19  # the lowest priority that there is


def at_low_priority(work: Callable[[], T]) -> T:
    """Runs it on a thread of its own, and returns or raises what it does.

    Threads that the work starts have its priority, and keep it: nobody may raise a priority without rights.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        thread_id = threading.get_native_id()  # on Linux threads have priorities of their own
        before = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(before + NICE, LOWEST))
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="low-priority")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
