"""Tasks end in the order of their submission; errors reach whoever waits."""

from __future__ import annotations

import threading

import pytest

from pegainfer.runtime.worker import Worker


def test_tasks_run_in_order_and_submit_does_not_wait() -> None:
    worker, gate, seen = Worker("test"), threading.Event(), []

    def first() -> str:
        gate.wait()
        seen.append(1)
        return "one"

    one = worker.submit(first)
    two = worker.submit(lambda: seen.append(2))
    assert not one.done()
    assert not two.done()
    gate.set()
    assert two.wait() is None
    assert one.done()
    assert one.wait() == one.wait() == "one"
    assert seen == [1, 2]
    worker.close()


def test_an_error_is_raised_at_every_wait_and_the_worker_goes_on() -> None:
    worker = Worker("test")

    def fails() -> None:
        raise ValueError("no")

    task = worker.submit(fails)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            task.wait()
    assert worker.submit(lambda: 3).wait() == 3
    worker.close()


def test_close_waits_for_what_was_submitted() -> None:
    worker, seen = Worker("test"), []
    for i in range(100):
        worker.submit(lambda i=i: seen.append(i))
    worker.close()
    assert seen == list(range(100))
