"""Messages of any thread to one that takes them, which may sleep until there is one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pegainfer.contract.errors import EngineDeadError

T = TypeVar("T")


class Inbox(Generic[T]):
    """open ─► put, take in the order of `put` ─► shut: nothing enters any more."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._wake = threading.Event()
        self._door = threading.Lock()  # so that nothing enters after the last look
        self._death: EngineDeadError | None = None

    # From any thread

    def put(self, message: T) -> None:
        """Adds a message and wakes the taker. Raises what it was shut with."""
        with self._door:
            if self._death is not None:
                raise self._death
            self._messages.append(message)
        self._wake.set()

    def wake(self) -> None:
        """Ends a `wait` without a message."""
        self._wake.set()

    @property
    def death(self) -> EngineDeadError | None:
        """What it was shut with; None while it is open."""
        return self._death

    # On the taker's thread

    def __len__(self) -> int:
        return len(self._messages)

    def take(self) -> Iterator[T]:
        """Each message until there is none. Who fails at one leaves the others to `shut`."""
        self._wake.clear()
        while self._messages:
            yield self._messages.popleft()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleeps until a wake-up that `take` has not seen; False if there was none for so long."""
        return self._wake.wait(seconds)

    def shut(self, death: EngineDeadError) -> list[T]:
        """Lets nothing in any more; returns what nobody took."""
        with self._door:
            self._death = death
            left = list(self._messages)
            self._messages.clear()
        return left
