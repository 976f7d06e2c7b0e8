"""A thread that runs tasks strictly in the order of their submission: the stream of a host device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pegainfer.runtime.priority import at_usual_priority

T = TypeVar("T")


class Task(Generic[T]):
    """One submitted call; its result may be waited for any number of times."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        # Held until the call has ended: what an Event does takes tens of microseconds beside a large model.
        self._running = threading.Lock()
        self._running.acquire()
        self._ended = False
        self._result: T | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._ended

    def wait(self) -> T:
        """Blocks until the call has ended and returns its result. Raises what it raised."""
        if not self._ended:
            with self._running:
                pass
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        """Called once, by the worker."""
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as e:
            self._error = e
        self._call = None  # what it holds must not outlive it
        self._ended = True
        self._running.release()


class Worker:
    """Starts its thread at once. `submit` may be called from any thread, `close` once."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        at_usual_priority(self._thread.start)

    def submit(self, call: Callable[[], T]) -> Task[T]:
        task = Task(call)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """Returns when every submitted task has ended."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
