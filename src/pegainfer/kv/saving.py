"""Copies of blocks that no sequence waits for: down to a lower tier, or from a disk up to host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pegainfer.contract.step import NO_BLOCK
from pegainfer.contract.tiers import DEVICE, Tier, Transfer
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.eviction import NOBODY, Owner
from pegainfer.kv.moves import Move, Moves
from pegainfer.kv.prefix import find_prefix

SPILL_BELOW = 4  # a pool spills while fewer than one in so many of its blocks is free
SPILLING = 4  # and while at most one in so many of its blocks is on its way


class Saver:
    """Decides what is copied when. Mutates the pools that `moves` names."""

    def __init__(self, moves: Moves, tiers: Sequence[Tier]) -> None:
        self._moves = moves
        self._kinds = [tier.kind for tier in tiers]
        # The last tier that keeps what is copied to it; peers below it are only read.
        self._lowest = sum(kind != "peer" for kind in self._kinds)
        # Blocks to be saved: (group, pool number, block) -> the key that the block had.
        self._wanted: OrderedDict[tuple[int, int, int], bytes] = OrderedDict()
        for levels in moves.levels:
            for pool in levels.pools[: self._lowest]:
                pool.fresh = OrderedDict()

    @property
    def has_wanted(self) -> bool:
        """Whether blocks are to be saved that `spill` has not looked at yet, or had no room for."""
        return bool(self._wanted)

    def reset(self) -> None:
        """Nothing is wanted any more."""
        self._wanted.clear()

    def save(self, g: int, blocks: Iterable[int], account: Owner = NOBODY) -> None:
        """These used device blocks of a group serve `account` again: those that have keys are saved soon."""
        pool = self._moves.levels[g].pools[DEVICE]
        for block in blocks:
            if block != NO_BLOCK:
                pool.use_for(block, account)
                self._want(g, DEVICE, block, pool.key(block))

    def save_cached(self, g: int, block: int) -> None:
        """A device block of a group, used or cached, is saved soon."""
        self._want(g, DEVICE, block, self._moves.levels[g].pools[DEVICE].key(block))

    def wants(self, g: int, block: int | None, key: bytes) -> bool:
        """Whether a device block is to be saved under this key."""
        return block is not None and self._wanted.get((g, DEVICE, block)) == key

    def _want(self, g: int, number: int, block: int, key: bytes | None) -> None:
        if key is not None and not any(pool.lookup(key) is not None for pool in self._below(g, number)):
            self._wanted[g, number, block] = key

    def _below(self, g: int, number: int) -> Sequence[BlockPool]:
        return self._moves.levels[g].pools[number + 1 : self._lowest + 1]

    def spill(self) -> list[Transfer]:
        """Transfers that bring saved blocks, and the longest-released ones of scarce pools, one tier down."""
        out: list[Transfer] = []
        for (g, number, block), key in list(self._wanted.items()):
            upper = self._moves.levels[g].pools[number]
            if upper.num_moving < self._most(upper):
                del self._wanted[g, number, block]
                if upper.key(block) == key:
                    out += self._spill(g, number, block, evict=False)
        for g, levels in enumerate(self._moves.levels):
            for number, upper in enumerate(levels.pools[: self._lowest]):
                fresh = upper.fresh
                assert fresh is not None
                scarce = upper.num_blocks // SPILL_BELOW + 1
                while fresh and upper.num_free < scarce and upper.num_moving < self._most(upper):
                    block = fresh.popitem(last=False)[0]
                    if upper.cached_key(block) is not None:
                        out += self._spill(g, number, block, evict=True)
        return out

    def _most(self, pool: BlockPool) -> int:
        """Blocks of a pool that may be on their way at once."""
        return max(1, pool.num_blocks // SPILLING)

    def _spill(self, g: int, number: int, block: int, *, evict: bool) -> list[Transfer]:
        """Empty where the block is in a lower tier already, or none has room for it."""
        upper = self._moves.levels[g].pools[number]
        key = upper.key(block)
        assert key is not None
        for target, lower in enumerate(self._below(g, number), number + 1):
            if lower.lookup(key) is not None or self._moves.coming(g, target, key) is not None:
                return []
        for target, lower in enumerate(self._below(g, number), number + 1):
            if lower.takes(upper.owner(block)):
                return [self._move_within(g, (number, block), target, key, evict=evict)]
        return []

    def _move_within(
        self, g: int, source: tuple[int, int], target: int, key: bytes, *, evict: bool
    ) -> Transfer:
        """Starts a transfer that no sequence waits for; the target pool has room."""
        pools = self._moves.levels[g].pools
        pools[source[0]].acquire(source[1])
        pools[source[0]].num_moving += 1
        return self._moves.start(g, source, (target, pools[target].allocate()), key, evict=evict)

    def prefetch(self, hashes: Sequence[bytes], num_tokens: int) -> list[Transfer]:
        """Transfers that bring the prefix of a sequence in the queue from disks to free host memory."""
        kinds = self._kinds
        if "host" not in kinds or "disk" not in kinds:
            return []
        m = self._moves
        host, out = kinds.index("host") + 1, []
        found = find_prefix(m.groups, m.levels, m.unit, hashes, num_tokens)
        for g, levels in enumerate(m.levels):
            for i, place in enumerate(found.blocks[g]):
                if place < levels.pools[DEVICE].num_blocks:  # NO_BLOCK included
                    continue
                number, block = levels.locate(place)
                source, target = levels.pools[number], levels.pools[host]
                key = m.key_of(g, i, hashes, found.num_tokens)
                busy = source.num_moving >= self._most(target) or m.coming(g, host, key) is not None
                if host < number <= self._lowest and target.num_free and not busy:
                    out.append(self._move_within(g, (number, block), host, key, evict=False))
        return out

    def end(self, move: Move, source: BlockPool, target: BlockPool, landed: bool) -> None:
        """A spill, a save or a prefetch has ended."""
        t = move.transfer
        source.num_moving -= 1
        if move.evict:
            source.settle(t.source)
        else:
            source.release(t.source, after=0)
            if landed and t.target_pool > t.source_pool:
                self._want(t.group, t.target_pool, t.target, target.key(t.target))
        target.release(t.target, after=0)
