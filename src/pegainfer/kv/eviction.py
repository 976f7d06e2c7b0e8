"""Which cached block of a lower tier is evicted: the least important first, then of whoever has the most."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

# Evictions, as multiples of a pool's size, after which a block that nobody used is evicted whoever owns it:
# without a bound, important blocks that are never used again would fill a tier for good.
STALE_TURNS = 4


class Owner(NamedTuple):
    """On whose account a block is kept."""

    priority: int = 0  # of the request; lower is more important
    tenant: str = ""


NOBODY = Owner()


class _Tenants:
    """The blocks of one priority by tenant. All operations take constant time."""

    def __init__(self) -> None:
        self.blocks: dict[str, OrderedDict[int, None]] = {}  # by tenant; the first released first
        # Tenants by how many blocks they have; the first that came to this number first.
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def add(self, tenant: str, block: int, *, first: bool) -> None:
        blocks = self.blocks.setdefault(tenant, OrderedDict())
        blocks[block] = None
        if first:
            blocks.move_to_end(block, last=False)
        self._recount(tenant, len(blocks) - 1, len(blocks))

    def remove(self, tenant: str, block: int) -> None:
        blocks = self.blocks[tenant]
        del blocks[block]
        self._recount(tenant, len(blocks) + 1, len(blocks))
        if not blocks:
            del self.blocks[tenant]

    def next(self) -> int:
        """The oldest block of the tenant that has the most."""
        tenant = next(iter(self._by_count[self._most]))
        return next(iter(self.blocks[tenant]))

    def _recount(self, tenant: str, old: int, new: int) -> None:
        if old:
            same = self._by_count[old]
            del same[tenant]
            if not same:
                del self._by_count[old]
        if new:
            self._by_count.setdefault(new, OrderedDict())[tenant] = None
        if new > self._most or self._most not in self._by_count:
            self._most = new


class OwnedBlocks(OrderedDict[int, None]):
    """The cached blocks of one pool in the order of their release, given out by priority and tenant."""

    def __init__(self, num_blocks: int, owners: Sequence[Owner]) -> None:
        """`owners`: by block; that of a block in here does not change."""
        super().__init__()
        self._owners = owners
        self._classes: dict[int, _Tenants] = {}  # by priority, those that have blocks
        self._worst: list[int] = []  # a heap of negated priorities; some have no blocks any more
        self._in_heap: set[int] = set()  # priorities, so that each is in the heap once
        self._stale_after = STALE_TURNS * num_blocks
        self._evictions = 0
        self._added_at = [0] * num_blocks  # evictions before a block was added

    def __setitem__(self, block: int, value: None) -> None:
        super().__setitem__(block, value)
        self._added_at[block] = self._evictions
        self._add(block, first=False)

    def __delitem__(self, block: int) -> None:
        super().__delitem__(block)
        self._remove(block)

    def popitem(self, last: bool = True) -> tuple[int, None]:
        """Takes out the next block to be evicted, whatever `last` is."""
        oldest = next(iter(self))
        block = oldest if self._is_stale(oldest) else self._classes[self._lowest()].next()
        del self[block]
        self._evictions += 1
        return block, None

    def move_to_end(self, block: int, last: bool = True) -> None:
        """Makes a block the last or the next of its owner's to be evicted."""
        super().move_to_end(block, last)
        self._remove(block)
        self._add(block, first=not last)

    def clear(self) -> None:
        super().clear()
        self._classes.clear()
        self._worst.clear()
        self._in_heap.clear()

    def yields_to(self, owner: Owner) -> bool:
        """Whether a block of `owner` may take the place of the next to be evicted."""
        return bool(self) and (self._lowest() >= owner.priority or self._is_stale(next(iter(self))))

    def _add(self, block: int, *, first: bool) -> None:
        priority, tenant = self._owners[block]
        if priority not in self._classes:
            self._classes[priority] = _Tenants()
            if priority not in self._in_heap:
                self._in_heap.add(priority)
                heapq.heappush(self._worst, -priority)
        self._classes[priority].add(tenant, block, first=first)

    def _remove(self, block: int) -> None:
        priority, tenant = self._owners[block]
        same = self._classes[priority]
        same.remove(tenant, block)
        if not same.blocks:
            del self._classes[priority]

    def _is_stale(self, block: int) -> bool:
        return self._evictions - self._added_at[block] >= self._stale_after

    def _lowest(self) -> int:
        """The least important priority that has blocks."""
        while -self._worst[0] not in self._classes:
            self._in_heap.remove(-heapq.heappop(self._worst))
        return -self._worst[0]
