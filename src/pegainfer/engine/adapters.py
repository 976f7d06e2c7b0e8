"""Which adapters have names, which of them lie in the device's slots, and which sequences wait for a slot.

An engine has any number of adapters and `size` slots. A sequence claims its adapter before it is admitted:

    claim ─ in a slot ──────────────────────────────────────────► held … leave ─► the slot is idle
      └ parked ─ a slot is free, or an idle one is taken ─► loading ─► held

Idle slots are taken in the order of their last use. Where none is idle, slots are given out in the order in
which adapters were asked for: some are closed to new sequences, so that they become idle when those that
hold them have ended. Held slots belong to sequences that need no other slot, so nobody waits in a circle.
"""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

from pegainfer.contract.adapter import NO_ADAPTER, AdapterInfo, AdapterLoad
from pegainfer.contract.errors import InvariantError, RequestError

T = TypeVar("T")  # a sequence


class Adapter(Generic[T]):
    """A loaded adapter, from its load until its last sequence has ended."""

    __slots__ = ("closing", "holds", "info", "last_use", "live", "number", "parked", "ready", "slot")

    def __init__(self, number: int, info: AdapterInfo) -> None:
        self.number = number  # never used again, other than the name
        self.info = info
        self.slot = NO_ADAPTER  # index of the slot that has its factors, or gets them
        self.ready = False  # they are there
        self.closing = False  # the slot is to go to another adapter: it takes no more sequences
        self.live = 0  # sequences that have not ended
        self.holds = 0  # of these, sequences that keep it in its slot
        self.parked: list[T] = []  # sequences that wait for a slot
        self.last_use = 0  # counts claims


class AdapterTable(Generic[T]):
    """All adapters of an engine. A slot is used again when its last row's step is retired."""

    def __init__(self, size: int) -> None:
        """`size`: slots of the device."""
        self._slots: list[Adapter[T] | None] = [None] * size
        self._last_steps = [0] * size  # the last plan with a row that uses the slot
        self._named: dict[str, Adapter[T]] = {}
        self._unloaded: list[Adapter[T]] = []  # without a name, but with sequences or a slot
        self._wanted: dict[int, Adapter[T]] = {}  # by number: who gets slots, in this order
        self._starting: list[Adapter[T]] = []  # have a slot, but no load was started
        self._numbers = itertools.count(1)
        self._uses = 0
        # Half of the slots at most are closed at once, so that much-used adapters stay where they are.
        self._most_closing = max(1, size // 2)
        self.num_loads = 0

    # Names

    def add(self, info: AdapterInfo) -> None:
        """Requests may name a new adapter. It is loaded at once where a slot is free.

        Raises RequestError where its name is taken.
        """
        if info.name in self._named:
            raise RequestError(
                "an adapter of this name is loaded",
                got=info.name[:64],
                param="lora_name",
                remedy="unload it first, or load with load_inplace",
            )
        adapter: Adapter[T] = Adapter(next(self._numbers), info)
        self._named[info.name] = adapter
        if None in self._slots:
            self._begin(adapter, self._slots.index(None))

    def drop(self, name: str) -> bool:
        """The name finds nothing any more. Raises RequestError for a name that is not loaded.

        Returns whether it has sequences that do not hold a slot.
        """
        adapter = self.find(name, "lora_name")
        del self._named[name]
        self._unloaded.append(adapter)
        return adapter.live > adapter.holds

    def find(self, name: str, param: str = "adapter") -> Adapter[T]:
        """The adapter of a name. Raises RequestError, which blames the field `param`."""
        found = self._named.get(name)
        if found is None:
            raise RequestError("no such adapter is loaded", got=name[:64], param=param)
        return found

    def take_unloaded(self, retired: int) -> list[AdapterInfo]:
        """Unloaded adapters that nothing uses now that step `retired` is committed, each once.

        The slot of one that has a slot is free then.
        """
        gone = [a for a in self._unloaded if not a.live and self._is_settled(a, retired)]
        for adapter in gone:
            self._unloaded.remove(adapter)
            if adapter.slot != NO_ADAPTER:
                self._slots[adapter.slot] = None
        return [adapter.info for adapter in gone]

    def _is_settled(self, adapter: Adapter[T], retired: int) -> bool:
        """Whether no load of it is under way, and no plan in flight uses its slot."""
        slot = adapter.slot
        return slot == NO_ADAPTER or (adapter.ready and self._last_steps[slot] <= retired)

    # Sequences

    def claim(self, adapter: Adapter[T], seq: T) -> bool:
        """Whether the adapter is in a slot, which `seq` then holds until it leaves; else it is parked."""
        self._uses += 1
        adapter.last_use = self._uses
        if adapter.ready and not adapter.closing:
            adapter.holds += 1
            return True
        adapter.parked.append(seq)
        if adapter.slot == NO_ADAPTER or adapter.closing:
            self._wanted.setdefault(adapter.number, adapter)
        return False

    def share(self, adapter: Adapter[T] | None) -> bool:
        """One more sequence holds the slot that another one holds; False without an adapter."""
        if adapter is not None:
            adapter.holds += 1
        return adapter is not None

    def leave(self, adapter: Adapter[T], seq: T, last_step: int, *, holds: bool) -> None:
        """A live sequence has ended, whose last row is in plan `last_step`."""
        adapter.live -= 1
        if holds:
            adapter.holds -= 1
            self._last_steps[adapter.slot] = max(self._last_steps[adapter.slot], last_step)
        elif seq in adapter.parked:
            adapter.parked.remove(seq)
            if not adapter.parked:
                self._wanted.pop(adapter.number, None)

    # Slots

    @property
    def is_loading(self) -> bool:
        """Whether an adapter waits for a slot or for its factors."""
        return bool(self._wanted) or any(a is not None and not a.ready for a in self._slots)

    def assign(self) -> list[T]:
        """Gives slots to the adapters that want one; returns sequences that hold theirs after all."""
        released: list[T] = []
        for adapter in tuple(self._wanted.values()):
            if adapter.slot != NO_ADAPTER:  # it was closed for another adapter, which does not need it now
                released += self._reopen(adapter)
                continue
            slot = self._idle_slot()
            if slot is None:
                break
            del self._wanted[adapter.number]
            self._begin(adapter, slot)
        return released + self._close()

    def take_loads(self, retired: int) -> list[AdapterLoad]:
        """Loads to start now that step `retired` is committed, each once."""
        able = [a for a in self._starting if self._last_steps[a.slot] <= retired]
        self._starting = [a for a in self._starting if a not in able]
        return [AdapterLoad(a.slot, a.info) for a in able]

    def loaded(self, slot: int) -> list[T]:
        """A load has ended: the parked sequences, which hold the slot now."""
        adapter = self._loading(slot)
        adapter.ready = True
        return self._release(adapter)

    def failed(self, slot: int) -> list[T]:
        """A load has failed and the slot is free: the parked sequences, which cannot run."""
        adapter = self._loading(slot)
        self._slots[slot] = None
        adapter.slot = NO_ADAPTER
        parked, adapter.parked = adapter.parked, []
        return parked

    def _loading(self, slot: int) -> Adapter[T]:
        adapter = self._slots[slot]
        if adapter is None or adapter.ready or adapter in self._starting:
            raise InvariantError(f"adapter slot {slot} was loaded, but no load of it was started")
        return adapter

    def _begin(self, adapter: Adapter[T], slot: int) -> None:
        """Gives a slot to an adapter; who had it before is in no slot any more."""
        before = self._slots[slot]
        if before is not None:
            before.slot, before.ready, before.closing = NO_ADAPTER, False, False
        self._slots[slot] = adapter
        adapter.slot = slot
        self._starting.append(adapter)
        self.num_loads += 1

    def _idle_slot(self) -> int | None:
        """A free slot, else the one that was not used for longest."""
        if None in self._slots:
            return self._slots.index(None)
        idle = [a for a in self._slots if a is not None and a.ready and not a.holds]
        return min(idle, key=lambda a: a.last_use).slot if idle else None

    def _release(self, adapter: Adapter[T]) -> list[T]:
        """The adapter is ready and open: what was parked holds it now."""
        parked, adapter.parked = adapter.parked, []
        adapter.holds += len(parked)
        return parked

    def _reopen(self, adapter: Adapter[T]) -> list[T]:
        adapter.closing = False
        self._wanted.pop(adapter.number, None)
        return self._release(adapter)

    def _close(self) -> list[T]:
        """Closes a slot for each adapter that waits for one; reopens slots that nobody waits for."""
        released: list[T] = []
        closing = [a for a in self._slots if a is not None and a.closing]
        while len(closing) > min(len(self._wanted), self._most_closing):
            released += self._reopen(closing.pop())
        missing = min(len(self._wanted), self._most_closing) - len(closing)
        if missing > 0:
            able = [a for a in self._slots if a is not None and a.ready and not a.closing]
            for adapter in sorted(able, key=lambda a: (a.holds, a.last_use))[:missing]:
                adapter.closing = True
        return released

    def check_integrity(self) -> None:
        """Raises InvariantError unless slots and adapters agree and every wait will end."""
        known = [*self._named.values(), *self._unloaded]
        in_slots = {a.number: a.slot for a in known if a.slot != NO_ADAPTER}
        if in_slots != {a.number: i for i, a in enumerate(self._slots) if a is not None}:
            raise InvariantError(f"adapters have slots {in_slots}, which is not what the slots hold")
        for a in known:
            waits = a.number in self._wanted or (a.slot != NO_ADAPTER and not a.ready)
            if a.holds < 0 or a.holds + len(a.parked) > a.live or (a.holds and not a.ready):
                raise InvariantError(
                    f"adapter {a.number}: {a.live} live sequences, {a.holds} hold it, {len(a.parked)} parked"
                )
            if bool(a.parked) > waits or (a.closing and not a.ready):
                raise InvariantError(f"adapter {a.number} has parked sequences, but nothing brings it in")
