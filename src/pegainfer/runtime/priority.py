"""Work that leaves the processor to others while they want it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

NICE = 15  # beside a thread of usual priority it gets about a thirtieth of a core


def at_low_priority(work: Callable[[], T]) -> T:
    """Runs it on a thread of its own, and returns or raises what it does.

    Threads that the work starts have its priority, and keep it: nobody may raise a priority without rights.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        thread_id = threading.get_native_id()  # on Linux threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, thread_id, max(NICE, os.getpriority(os.PRIO_PROCESS, thread_id)))
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
