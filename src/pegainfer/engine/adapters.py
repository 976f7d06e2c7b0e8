"""Which adapters are loaded, under which index, and when an index of an unloaded one can be used again."""

from __future__ import annotations

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import InvariantError, RequestError


class AdapterTable:
    """Indices 0..size-1, each free, loaded (a name finds it), or dropped (only sequences still use it).

    A sequence uses an index from `enter` to `leave`, and its rows in flight until their last step is retired.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._loaded: dict[str, tuple[int, AdapterInfo]] = {}
        self._free = list(range(size - 1, -1, -1))
        self._dropped: list[int] = []
        self._uses = [0] * size  # sequences
        self._last_steps = [0] * size  # the last plan that has a row of a sequence that left

    def add(self, info: AdapterInfo) -> int:
        """The index of a new adapter. Raises RequestError where its name is taken or no index is free."""
        if info.name in self._loaded:
            raise RequestError(
                "an adapter of this name is loaded",
                got=info.name[:64],
                param="lora_name",
                remedy="unload it first",
            )
        if not self._free:
            raise RequestError(
                "no adapter can be loaded besides",
                expected=f"at most {self._size} adapters",
                got=f"{len(self._loaded)} loaded, {len(self._dropped)} in use by running requests",
                remedy="unload one",
            )
        index = self._free.pop()
        self._loaded[info.name] = (index, info)
        self._last_steps[index] = 0
        return index

    def drop(self, name: str) -> None:
        """The name finds nothing any more. Raises RequestError for a name that is not loaded."""
        index, _ = self.find(name, "lora_name")
        del self._loaded[name]
        self._dropped.append(index)

    def find(self, name: str, param: str = "adapter") -> tuple[int, AdapterInfo]:
        """Index and description of a loaded adapter. Raises RequestError, which blames the field `param`."""
        found = self._loaded.get(name)
        if found is None:
            raise RequestError("no such adapter is loaded", got=name[:64], param=param)
        return found

    def enter(self, index: int) -> None:
        """A sequence uses the adapter from now on."""
        self._uses[index] += 1

    def leave(self, index: int, last_step: int) -> None:
        """A sequence has ended, whose last row is in plan `last_step`."""
        self._uses[index] -= 1
        self._last_steps[index] = max(self._last_steps[index], last_step)

    def take_free(self, retired: int) -> list[int]:
        """Dropped indices that nothing uses now that step `retired` is committed; they are free then."""
        free = [i for i in self._dropped if not self._uses[i] and self._last_steps[i] <= retired]
        if free:
            self._dropped = [i for i in self._dropped if i not in free]
            self._free += free
        return free

    def check_integrity(self) -> None:
        """Raises InvariantError unless every index is in exactly one state and free ones are unused."""
        held = [index for index, _ in self._loaded.values()]
        if sorted(held + self._dropped + self._free) != list(range(self._size)):
            raise InvariantError(
                f"adapters loaded {held}, dropped {self._dropped}, free {self._free} are no partition"
            )
        if any(uses < 0 for uses in self._uses) or any(self._uses[i] for i in self._free):
            raise InvariantError(f"sequences per adapter index are {self._uses}, with {self._free} free")
