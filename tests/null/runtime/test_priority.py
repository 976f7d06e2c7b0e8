"""Work at a low priority: on a thread of its own, with its results and errors."""

from __future__ import annotations

import os
import threading

import pytest

from pegainfer.runtime.priority import LOWEST, NICE, at_low_priority, at_usual_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_work_and_the_threads_it_starts_are_nice_and_nobody_else() -> None:
    before = niceness()
    seen: list[int] = []

    def work() -> str:
        seen.append(niceness())
        other = threading.Thread(target=lambda: seen.append(niceness()))
        other.start()
        other.join()
        return "done"

    assert at_low_priority(work) == "done"
    assert seen == [min(before + NICE, LOWEST)] * 2
    assert niceness() == before


def test_its_errors_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


def test_threads_that_outlive_the_work_are_not_nice() -> None:
    before = niceness()
    seen: list[int] = []

    def start() -> str:
        other = threading.Thread(target=lambda: seen.append(niceness()))
        other.start()
        other.join()
        return "started"

    assert at_low_priority(lambda: at_usual_priority(start)) == "started"
    assert at_usual_priority(start) == "started"  # outside such work, too
    assert seen == [before] * 2
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: at_usual_priority(lambda: 1 // 0))
