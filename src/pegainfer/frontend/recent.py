"""What was used last, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A mapping that drops the longest unused entries first. Its owner sees to threads."""

    def __init__(self, max_bytes: int, size: Callable[[K, V], int]) -> None:
        """`size`: bytes of an entry."""
        self._max_bytes = max_bytes
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: K) -> V | None:
        """None for what is not there; else it counts as used now."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Keeps an entry; one of that key stays as it is."""
        if key in self._entries:
            return
        self._entries[key] = value
        self.num_bytes += self._size(key, value)
        self._drop()

    def limit(self, max_bytes: int) -> None:
        """Changes how many bytes it may hold."""
        self._max_bytes = max_bytes
        self._drop()

    def _drop(self) -> None:
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._size(*self._entries.popitem(last=False))
