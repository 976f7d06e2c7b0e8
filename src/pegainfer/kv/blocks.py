"""The blocks of one KV group: who uses them, which are free, and which are free but still remembered."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from pegainfer.contract.errors import InvariantError
from pegainfer.kv.eviction import NOBODY, OwnedBlocks, Owner

MOST_USES = 3  # a block that was hit more often is passed over no longer than one that was hit so often


class BlockPool:
    """Blocks 0..n-1, each in exactly one of three states.

    used    references > 0: tables of sequences, or a deferred release that waits for a plan
    cached  no reference, but a key finds it: `acquire` revives it, `allocate` evicts the oldest
    free    no reference, no key

    A release names the last plan that touches the block; the reference is dropped when that plan is retired,
    so that nothing is overwritten while a device may still read it.
    """

    __slots__ = (
        "_cached",
        "_deferred",
        "_free",
        "_index",
        "_keys",
        "_observer",
        "_owners",
        "_refs",
        "_retired",
        "_uses",
        "fresh",
        "name",
        "num_blocks",
        "num_deferred",
        "num_moving",
    )

    def __init__(self, name: str, num_blocks: int, *, by_owner: bool = False) -> None:
        """`by_owner`: evicts by priority and tenant (kv/eviction.py) instead of by age alone."""
        self.name = name
        self.num_blocks = num_blocks
        self.num_deferred = 0  # references that wait for a plan
        self.num_moving = 0  # references that are given back once a block is copied to a lower tier
        # Blocks that were cached since they were last taken out, the first released first; None without a
        # tier below. Some of them may have been revived or evicted since.
        self.fresh: OrderedDict[int, None] | None = None
        self._refs = [0] * num_blocks
        self._uses = bytearray(num_blocks)  # evictions that a cached block is still passed over for
        self._keys: list[bytes | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is the warmest
        self._owners = [NOBODY] * num_blocks  # of used and cached blocks
        self._cached: OrderedDict[int, None] = (  # oldest first
            OwnedBlocks(num_blocks, self._owners) if by_owner else OrderedDict()
        )
        self._index: dict[bytes, int] = {}
        self._deferred: dict[int, list[int]] = {}  # step -> one entry a reference
        self._observer: tuple[Callable[[bytes], None], Callable[[bytes], None]] | None = None
        self._retired = 0  # the highest retired step; steps count from 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def lookup(self, key: bytes) -> int | None:
        """The block that holds `key`, used or cached. Takes no reference."""
        return self._index.get(key)

    def lookup_run(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of `keys` up to the first that no block holds. Takes no reference."""
        found: list[int] = []
        index = self._index
        for key in keys:
            block = index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def key(self, block: int) -> bytes | None:
        """The key that finds a used or cached block; None without one."""
        return self._keys[block]

    def cached_key(self, block: int) -> bytes | None:
        """The key of a cached block; None for a block in another state."""
        return self._keys[block] if block in self._cached else None

    def observe(self, stored: Callable[[bytes], None], removed: Callable[[bytes], None]) -> None:
        """Calls `stored` for each key that finds a block, now or later, and `removed` when it no longer does.

        `forget_all` calls neither.
        """
        self._observer = stored, removed
        for key in self._index:
            stored(key)

    def adopt(self, stored: Iterable[tuple[int, bytes]]) -> None:
        """Caches what free blocks hold since an earlier run: (block, key), the first to be evicted first.

        Blocks that the pool does not have are passed over.
        """
        for block, key in stored:
            if block < self.num_blocks:
                self._keys[block] = key
                self._index[key] = block
                self._cached[block] = None
        self._free = [block for block in self._free if block not in self._cached]

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these cached or used blocks nobody holds."""
        refs = self._refs
        return len([block for block in blocks if not refs[block]])

    def note_use(self, block: int) -> None:
        """A hit: when the block is the next to be evicted, it is passed over once for each, MOST_USES times
        at most."""
        self._uses[block] = min(MOST_USES, self._uses[block] + 1)

    def owner(self, block: int) -> Owner:
        """On whose account a used or cached block is kept."""
        return self._owners[block]

    def use_for(self, block: int, owner: Owner) -> None:
        """A used block serves `owner`: it is as important as its most important user, and the latest's."""
        self._owners[block] = Owner(min(owner.priority, self._owners[block].priority), owner.tenant)

    def takes(self, owner: Owner) -> bool:
        """Whether a block of `owner` finds room: a free block, or one that is no more important."""
        if self._free or not isinstance(self._cached, OwnedBlocks):
            return self.available > 0
        return self._cached.yields_to(owner)

    def allocate(self) -> int:
        """A block with one reference and no key; evicts a cached block if it must, the one released longest
        ago or the least important one."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            while self._uses[block]:
                self._uses[block] -= 1
                self._cached[block] = None
                block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise InvariantError(f"KV group '{self.name}': allocation from an exhausted pool")
        self._refs[block] = 1
        return block

    def acquire(self, *blocks: int) -> None:
        """One more reference to each of these blocks, which are used or cached."""
        refs, cached = self._refs, self._cached
        for block in blocks:
            if not refs[block]:
                if block not in cached:
                    raise InvariantError(
                        f"KV group '{self.name}': block {block} is free and cannot be shared"
                    )
                del cached[block]
            refs[block] += 1

    def release(self, *blocks: int, after: int) -> None:
        """Drops one reference to each once step `after` is retired; at once if it is already."""
        if after <= self._retired:
            self._drop(blocks)
            return
        self._deferred.setdefault(after, []).extend(blocks)
        self.num_deferred += len(blocks)

    def settle(self, block: int) -> None:
        """Drops a reference at once; if the block is cached then, it is the next to be evicted."""
        self._drop((block,))
        if block in self._cached:
            self._cached.move_to_end(block, last=False)
            if self.fresh is not None:
                self.fresh.pop(block, None)

    def retire(self, step: int) -> None:
        """Step `step` is committed, and so are all before it: references that waited for it are dropped."""
        self._retired = step
        blocks = self._deferred.pop(step, None)
        if blocks is not None:
            self.num_deferred -= len(blocks)
            self._drop(blocks)

    def publish(self, block: int, key: bytes, owner: Owner = NOBODY) -> None:
        """Lets `key` find a used block. The first block of a key stays; a second copy remains private."""
        if self._refs[block] == 0:
            raise InvariantError(f"KV group '{self.name}': block {block} published without an owner")
        if key in self._index:
            return
        old = self._keys[block]
        if old is not None:
            raise InvariantError(f"KV group '{self.name}': block {block} already holds another key")
        self._keys[block] = key
        self._index[key] = block
        self._owners[block] = owner
        if self._observer is not None:
            self._observer[0](key)

    def discard(self, block: int, key: bytes) -> None:
        """Forgets a cached block that still holds `key`, so that it is free; otherwise does nothing."""
        if self.cached_key(block) == key:
            self.forget(block)

    def forget(self, block: int) -> None:
        """No key finds the block any more: a cached one is free, a used one stays with its holders."""
        key = self._keys[block]
        if key is not None:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """No key finds a block any more: cached blocks are free, used ones stay with their holders."""
        self._free += self._cached
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_blocks
        self._uses = bytearray(self.num_blocks)

    def _drop(self, blocks: Iterable[int]) -> None:
        refs, keys, free, cached = self._refs, self._keys, self._free, self._cached
        fresh = self.fresh
        for block in blocks:
            left = refs[block] - 1
            if left < 0:
                raise InvariantError(
                    f"KV group '{self.name}': block {block} released more often than acquired"
                )
            refs[block] = left
            if not left:
                if keys[block] is None:
                    free.append(block)
                else:
                    cached[block] = None
                    if fresh is not None:
                        fresh[block] = None
                        fresh.move_to_end(block)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is None:
            raise InvariantError(f"KV group '{self.name}': cached block {block} has no key")
        del self._index[key]
        self._keys[block] = None
        self._uses[block] = 0
        if self._observer is not None:
            self._observer[1](key)

    def check_integrity(self, holders: Counter[int] | None = None) -> None:
        """Raises InvariantError. `holders`: references by block that live tables should account for."""

        def fail(what: str) -> None:
            raise InvariantError(f"KV group '{self.name}': {what}")

        used = {b for b in range(self.num_blocks) if self._refs[b] > 0}
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free):
            fail("a block stands twice in the free list")
        total = len(used) + len(free) + len(cached)
        if used & free or used & cached or free & cached or total != self.num_blocks:
            sizes = f"{len(used)} used, {len(free)} free, {len(cached)} cached"
            fail(f"{sizes} do not partition {self.num_blocks}")
        if any(r < 0 for r in self._refs):
            fail("a reference count is negative")
        if any(self._keys[b] is not None for b in free) or any(self._keys[b] is None for b in cached):
            fail("free blocks must have no key, cached blocks must have one")
        if {b: k for b, k in enumerate(self._keys) if k is not None} != {
            b: k for k, b in self._index.items()
        }:
            fail("index and keys disagree")
        waiting = Counter(b for blocks in self._deferred.values() for b in blocks)
        if waiting.total() != self.num_deferred or any(step <= self._retired for step in self._deferred):
            fail("a deferred release was lost")
        if any(count > self._refs[b] for b, count in waiting.items()):
            fail("more deferred releases than references")
        if holders is not None:
            expected = holders + waiting
            for b in range(self.num_blocks):
                if self._refs[b] != expected[b]:
                    fail(f"block {b} has {self._refs[b]} references, its holders account for {expected[b]}")
