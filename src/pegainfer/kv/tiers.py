"""Blocks in memory below the device: spilled there before they are evicted, loaded back for a prefix hit.

    cached on the device ─► spill ─► held until it has landed ─► cached in both ─► evicted from the device
    used a second time ──► save ───► held until it has landed ─► in both; then saved to the next tier
    found in a tier ─► load ─► held until it has landed ─► cached on the device, where a sequence finds it
    wanted from a disk soon ─► prefetch ─► cached in host memory

A block that was released waits in its pool's `fresh` queue. It is spilled when its pool runs short of free
blocks, to the next tier that has room for its group; the same goes for blocks of a tier and the tier below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TierStats
from pegainfer.contract.peers import PeerBlock
from pegainfer.contract.step import NO_BLOCK, PageGroup, StateGroup
from pegainfer.contract.tiers import DEVICE, Tier
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.eviction import NOBODY, Owner
from pegainfer.kv.exports import HOST, Exports
from pegainfer.kv.levels import Levels
from pegainfer.kv.moves import Load, Moves
from pegainfer.kv.prefix import PrefixHit, find_prefix
from pegainfer.kv.saving import Saver

# Whether to load tokens [start, end) with so many bytes from each pool, rather than to compute them.
Worth = Callable[[int, int, dict[int, int]], bool]


def always(start: int, end: int, nbytes: dict[int, int]) -> bool:
    """Loads whatever is found."""
    return True


def _pool_of(name: str, tier: Tier, g: int) -> BlockPool:
    return BlockPool(f"{name} ({tier.kind})", tier.num_blocks[g], by_owner=True)


class Tiers:
    """The tiers of one data-parallel rank. Mutates the pools; not thread safe."""

    def __init__(
        self,
        groups: Sequence[PageGroup | StateGroup],
        pools: Sequence[BlockPool],
        unit: int,
        tiers: Sequence[Tier],
        rank: int,
        ids: Iterator[int],
    ) -> None:
        """
        Args:
            pools: of the device, by group.
            unit: tokens that one hash covers.
            ids: of transfers, shared by all ranks.
        """
        self._groups = groups
        self._tiers = tiers
        self._unit = unit
        self._levels = [
            Levels([pool, *(_pool_of(group.name, tier, g) for tier in tiers)])
            for g, (group, pool) in enumerate(zip(groups, pools, strict=True))
        ]
        for number, tier in enumerate(tiers, 1):
            for levels, stored in zip(self._levels, tier.stored):  # noqa: B905 - may be empty
                levels.pools[number].adopt(stored)
        self._moves = Moves(groups, self._levels, unit, rank, ids)
        self.saver = Saver(self._moves, tiers)
        self.exports = Exports(self._moves, self.saver)
        self.must_reset = False  # the next plan has to reset the runner's tiers
        self._unreported: list[Load] = []  # loads that ended with nobody to tell yet
        self._hit_tokens = [0] * len(tiers)
        self._failures = [0] * len(tiers)

    def kept_pools(self, g: int) -> list[tuple[str, BlockPool]]:
        """Kind and pool of each tier that holds blocks of a group in this engine, so without peers."""
        pools = self._levels[g].pools[1:]
        return [(t.kind, pool) for t, pool in zip(self._tiers, pools, strict=True) if t.kind != "peer"]

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self._moves.under_way)

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Tokens of the longest prefix that the device and the tiers have together; see `find_prefix`."""
        return find_prefix(self._groups, self._levels, self._unit, hashes, num_tokens).num_tokens

    def load(
        self,
        owner: Any,
        hashes: Sequence[bytes],
        num_tokens: int,
        hit: PrefixHit,
        spare: Sequence[int],
        worth: Worth = always,
        account: Owner = NOBODY,
    ) -> Load | None:
        """Starts to load what the tiers have beyond `hit`, or joins a load that brings some of it.

        None, and nothing changed, where that is nothing or not worth it, or where there is no room. A load
        that was joined has several owners.

        Args:
            owner: handed back when the load has ended; after one that was joined, there may be more to load.
            hashes, num_tokens: as in `find_prefix`; `hit` is what it found on the device.
            spare: device blocks of each group that must stay available.
            account: whom the blocks serve.
        """
        found = find_prefix(self._groups, self._levels, self._unit, hashes, num_tokens)
        if found.num_tokens <= hit.num_tokens:
            return None
        if (other := self._coming_load(hashes, found)) is not None:
            other.owners.append(owner)
            return other
        places = [[p for p in blocks if p != NO_BLOCK] for blocks in found.blocks]
        for g, levels in enumerate(self._levels):
            device = levels.pools[DEVICE]
            kept = [place for place in places[g] if place < device.num_blocks]
            need = len(places[g]) - len(kept)
            if need and device.available - device.num_idle(kept) - need < spare[g]:
                return None
        nbytes, tokens = self._sources(places, found.num_tokens)
        if not worth(hit.num_tokens, found.num_tokens, nbytes):
            return None
        for number, count in tokens.items():
            self._hit_tokens[number - 1] += count
        load = Load([owner])
        # What is there is held first, so that no allocation evicts it.
        for g, levels in enumerate(self._levels):
            for place in places[g]:
                number, block = levels.locate(place)
                levels.pools[number].acquire(block)
                levels.pools[number].use_for(block, account)
                if number == DEVICE:
                    load.held.append((levels.pools[DEVICE], block))
                else:
                    levels.pools[number].note_use(block)
        for g, levels in enumerate(self._levels):
            for i, place in enumerate(found.blocks[g]):
                if place == NO_BLOCK or place < levels.pools[DEVICE].num_blocks:
                    continue
                target = levels.pools[DEVICE].allocate()
                key = self._moves.key_of(g, i, hashes, found.num_tokens)
                transfer = self._moves.start(g, levels.locate(place), (DEVICE, target), key, load)
                load.transfers.append(transfer)
        load.left = len(load.transfers)
        return load

    def _coming_load(self, hashes: Sequence[bytes], found: PrefixHit) -> Load | None:
        """A load under way that brings one of the blocks that `found` has in lower tiers."""
        for g, levels in enumerate(self._levels):
            for i, place in enumerate(found.blocks[g]):
                if place >= levels.pools[DEVICE].num_blocks:
                    move = self._moves.coming(g, DEVICE, self._moves.key_of(g, i, hashes, found.num_tokens))
                    if move is not None:
                        return move.load
        return None

    def _sources(self, places: Sequence[Sequence[int]], num_tokens: int) -> tuple[Counter[int], Counter[int]]:
        """What a load takes from each tier, by pool number: bytes; tokens that it has the pages of."""
        nbytes, tokens = Counter[int](), Counter[int]()
        paged = False
        for group, levels, found in zip(self._groups, self._levels, places, strict=True):
            numbers = Counter(levels.locate(place)[0] for place in found)
            del numbers[DEVICE]
            page = isinstance(group, PageGroup)
            size = group.bytes_per_block if isinstance(group, PageGroup) else group.bytes_per_state
            for number, count in numbers.items():
                nbytes[number] += size * count
                if isinstance(group, PageGroup) and not paged:
                    tokens[number] += group.block_size * count
            paged = paged or page
        if not paged:
            tokens.update(dict.fromkeys(nbytes, num_tokens))
        return nbytes, tokens

    def end(self, transfer_id: int, *, landed: bool) -> bool:
        """A transfer has ended; False where it is none of this rank. See `take_loaded`.

        A target that landed can be found by its key. A source that could not be read is forgotten.
        """
        move = self._moves.end(transfer_id)
        if move is None:
            return False
        t = move.transfer
        pools = self._levels[t.group].pools
        source, target = pools[t.source_pool], pools[t.target_pool]
        if landed and move.epoch == self._moves.epoch:
            target.publish(t.target, t.key, source.owner(t.source))
        if not landed:
            self._failures[max(t.source_pool, t.target_pool) - 1] += 1
            if t.source_pool > t.target_pool and source.key(t.source) == t.key:
                source.forget(t.source)
        if move.load is None:
            self.saver.end(move, source, target, landed)
            return True
        source.release(t.source, after=0)
        load = move.load
        load.held.append((target, t.target))
        load.left -= 1
        load.failed |= not landed
        if not load.left:
            for pool, block in reversed(load.held):  # the head of a prefix is evicted last
                pool.release(block, after=0)
            load.held = []
            self._unreported.append(load)
        return True

    def take_loaded(self) -> list[Load]:
        """The loads whose last transfer has ended since the last call; their blocks are cached."""
        loads, self._unreported = self._unreported, []
        return loads

    def offer(self, blocks: Iterable[PeerBlock]) -> None:
        """A peer has these blocks: they can be found, and loaded, until they are withdrawn."""
        for block in blocks:
            pool = self._levels[block.group].pools[-1]
            if pool.lookup(block.key) is None and pool.available:
                place = pool.allocate()
                pool.publish(place, block.key)
                pool.release(place, after=0)

    def withdraw(self, blocks: Iterable[PeerBlock]) -> None:
        """A peer does not have these blocks any more; loads under way may fail."""
        for block in blocks:
            pool = self._levels[block.group].pools[-1]
            place = pool.lookup(block.key)
            if place is not None:
                pool.forget(place)

    def reset(self) -> None:
        """Forgets all that is cached in the tiers; what is on its way is not published when it lands."""
        self._moves.epoch += 1
        self.must_reset = True
        self.saver.reset()
        for levels in self._levels:
            for pool in levels.pools[1:]:
                pool.forget_all()

    def stats(self) -> list[TierStats]:
        """What this rank's tiers hold and have done, but for bytes and seconds."""
        return [
            TierStats(
                kind=tier.kind,
                total_blocks=sum(tier.num_blocks),
                cached_blocks=sum(levels.pools[number].num_cached for levels in self._levels),
                in_flight=sum(
                    number == max(m.transfer.source_pool, m.transfer.target_pool)
                    for m in self._moves.under_way.values()
                ),
                hit_tokens=self._hit_tokens[number - 1],
                failures=self._failures[number - 1],
            )
            for number, tier in enumerate(self._tiers, 1)
        ]

    def held_on_device(self, g: int) -> Counter[int]:
        """References to device blocks of a group that transfers and loads account for."""
        return self._moves.holders(g, DEVICE)

    def check_integrity(self) -> None:
        """Raises InvariantError unless every reference to a tier's block belongs to a transfer."""
        for g, levels in enumerate(self._levels):
            for number, pool in enumerate(levels.pools):
                spills = [
                    m for m in self._moves.under_way.values() if m.load is None and m.transfer.group == g
                ]
                moving = sum(m.transfer.source_pool == number for m in spills)
                if pool.num_moving != moving:
                    raise InvariantError(f"{pool.name}: {pool.num_moving} blocks are spilled, not {moving}")
                if number != DEVICE:
                    exported = self.exports.holders(g) if number == HOST else Counter[int]()
                    pool.check_integrity(self._moves.holders(g, number) + exported)
