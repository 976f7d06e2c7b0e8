"""Blocks in memory below the device: spilled there before they are evicted, loaded back for a prefix hit.

    cached on the device ─► spill ─► held until it has landed ─► cached in both ─► evicted from the device
    found in a tier ─► load ─► held until it has landed ─► cached on the device, where a sequence finds it

A block that was released waits in its pool's `fresh` queue. It is spilled when its pool runs short of free
blocks, to the next tier that has room for its group; the same goes for blocks of a tier and the tier below.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import NO_BLOCK, PageGroup, StateGroup
from pegainfer.contract.tiers import DEVICE, Tier, Transfer
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.prefix import PrefixHit, find_prefix

SPILL_BELOW = 4  # a pool spills while fewer than one in so many of its blocks is free
SPILLING = 8  # and while at most one in so many of its blocks is on its way


@dataclass(slots=True, eq=False)
class Load:
    """Transfers that bring one sequence's prefix to the device. It holds blocks until the last has ended."""

    owner: Any  # the sequence, which may have ended meanwhile
    transfers: list[Transfer] = field(default_factory=list)
    left: int = 0  # transfers that have not ended
    held: list[tuple[BlockPool, int]] = field(default_factory=list)  # device blocks, one reference each


@dataclass(frozen=True, slots=True)
class _Move:
    """A transfer in flight; it holds one reference to its source and one to its target."""

    transfer: Transfer
    key: bytes  # hash of the prefix that the block ends
    epoch: int  # resets of the prefix cache before it began
    load: Load | None  # None: a spill


class Levels:
    """One group's pools from the device downwards, searched as one.

    A place is a block's id plus the sizes of all pools above its own, so that places of device blocks are
    their ids.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self.pools = pools

    def lookup(self, key: bytes) -> int | None:
        """The place of `key` in the highest pool that has it."""
        offset = 0
        for pool in self.pools:
            block = pool.lookup(key)
            if block is not None:
                return offset + block
            offset += pool.num_blocks
        return None

    def lookup_run(self, keys: Sequence[bytes]) -> list[int]:
        """The places of `keys` up to the first that no pool has."""
        found: list[int] = []
        for key in keys:
            place = self.lookup(key)
            if place is None:
                break
            found.append(place)
        return found

    def locate(self, place: int) -> tuple[int, int]:
        """Pool number and block id of a place."""
        for number, pool in enumerate(self.pools):
            if place < pool.num_blocks:
                return number, place
            place -= pool.num_blocks
        raise InvariantError(f"place {place} lies below the last tier")


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
        self._unit = unit
        self._rank = rank
        self._ids = ids
        self._levels = [
            Levels([pool, *(BlockPool(f"{group.name} ({t.kind})", t.num_blocks[g]) for t in tiers)])
            for g, (group, pool) in enumerate(zip(groups, pools, strict=True))
        ]
        for levels in self._levels:
            for pool in levels.pools[:-1]:
                pool.fresh = OrderedDict()
        self._moves: dict[int, _Move] = {}
        self._epoch = 0
        self._unreported: list[Load] = []  # loads that ended with nobody to tell yet

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self._moves)

    def spill(self) -> list[Transfer]:
        """Transfers that bring the longest-released blocks of scarce pools one tier down."""
        out: list[Transfer] = []
        for g, levels in enumerate(self._levels):
            for number, upper in enumerate(levels.pools[:-1]):
                fresh = upper.fresh
                assert fresh is not None
                scarce = upper.num_blocks // SPILL_BELOW + 1
                most = upper.num_blocks // SPILLING + 1
                while fresh and upper.num_free < scarce and upper.num_moving < most:
                    transfer = self._spill(g, number, fresh.popitem(last=False)[0])
                    if transfer is not None:
                        out.append(transfer)
        return out

    def _spill(self, g: int, number: int, block: int) -> Transfer | None:
        """None where the block needs no spilling, or no tier below has room for it."""
        pools = self._levels[g].pools
        upper = pools[number]
        key = upper.cached_key(block)
        below = pools[number + 1 :]
        if key is None or any(pool.lookup(key) is not None for pool in below):
            return None
        for offset, lower in enumerate(below, 1):
            if lower.available:
                upper.acquire(block)
                upper.num_moving += 1
                return self._start(g, (number, block), (number + offset, lower.allocate()), key, None)
        return None

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> int:
        """Tokens of the longest prefix that the device and the tiers have together; see `find_prefix`."""
        return find_prefix(self._groups, self._levels, self._unit, hashes, num_tokens).num_tokens

    def load(
        self, owner: Any, hashes: Sequence[bytes], num_tokens: int, hit: PrefixHit, spare: Sequence[int]
    ) -> Load | None:
        """Starts to load what the tiers have beyond `hit`; None where that is nothing or there is no room.

        Args:
            owner: handed back when the load has ended.
            hashes, num_tokens: as in `find_prefix`; `hit` is what it found on the device.
            spare: device blocks of each group that must stay available.
        """
        found = find_prefix(self._groups, self._levels, self._unit, hashes, num_tokens)
        if found.num_tokens <= hit.num_tokens:
            return None
        places = [[p for p in blocks if p != NO_BLOCK] for blocks in found.blocks]
        for g, levels in enumerate(self._levels):
            device = levels.pools[DEVICE]
            kept = [place for place in places[g] if place < device.num_blocks]
            need = len(places[g]) - len(kept)
            if need and device.available - device.num_idle(kept) - need < spare[g]:
                return None
        load = Load(owner)
        # What is there is held first, so that no allocation evicts it.
        for g, levels in enumerate(self._levels):
            for place in places[g]:
                number, block = levels.locate(place)
                levels.pools[number].acquire(block)
                if number == DEVICE:
                    load.held.append((levels.pools[DEVICE], block))
        for g, levels in enumerate(self._levels):
            for i, place in enumerate(found.blocks[g]):
                if place == NO_BLOCK or place < levels.pools[DEVICE].num_blocks:
                    continue
                target = levels.pools[DEVICE].allocate()
                key = hashes[self._end_of(g, i, found.num_tokens) // self._unit - 1]
                transfer = self._start(g, levels.locate(place), (DEVICE, target), key, load)
                load.transfers.append(transfer)
        load.left = len(load.transfers)
        return load

    def _end_of(self, g: int, i: int, num_tokens: int) -> int:
        """Tokens of the prefix that entry `i` of a group's table ends, in a hit of `num_tokens`."""
        group = self._groups[g]
        return num_tokens if isinstance(group, StateGroup) else (i + 1) * group.block_size

    def _start(
        self, g: int, source: tuple[int, int], target: tuple[int, int], key: bytes, load: Load | None
    ) -> Transfer:
        transfer = Transfer(next(self._ids), g, *source, *target, self._rank)
        self._moves[transfer.id] = _Move(transfer, key, self._epoch, load)
        return transfer

    def end(self, transfer_id: int, *, landed: bool) -> bool:
        """A transfer has ended; False where it is none of this rank. See `take_loaded`.

        A target that landed can be found by its key. A source that could not be loaded is forgotten.
        """
        move = self._moves.pop(transfer_id, None)
        if move is None:
            return False
        t = move.transfer
        pools = self._levels[t.group].pools
        source, target = pools[t.source_pool], pools[t.target_pool]
        if landed and move.epoch == self._epoch:
            target.publish(t.target, move.key)
        if move.load is None:
            source.num_moving -= 1
            source.settle(t.source)
            target.release(t.target, after=0)
            return True
        if not landed:
            source.forget(t.source)
        source.release(t.source, after=0)
        load = move.load
        load.held.append((target, t.target))
        load.left -= 1
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

    def reset(self) -> None:
        """Forgets all that is cached in the tiers; what is on its way is not published when it lands."""
        self._epoch += 1
        for levels in self._levels:
            for pool in levels.pools[1:]:
                pool.forget_all()

    def holders(self, g: int, number: int) -> Counter[int]:
        """References to blocks of a pool that transfers and loads account for."""
        found: Counter[int] = Counter()
        loads: dict[int, Load] = {}
        for move in self._moves.values():
            t = move.transfer
            if t.group == g:
                found.update([t.source] if t.source_pool == number else [])
                found.update([t.target] if t.target_pool == number else [])
            if move.load is not None:
                loads[id(move.load)] = move.load
        pool = self._levels[g].pools[number]
        found.update(block for load in loads.values() for held, block in load.held if held is pool)
        return found

    def check_integrity(self) -> None:
        """Raises InvariantError unless every reference to a tier's block belongs to a transfer."""
        for g, levels in enumerate(self._levels):
            for number, pool in enumerate(levels.pools):
                spills = [m for m in self._moves.values() if m.load is None and m.transfer.group == g]
                moving = sum(m.transfer.source_pool == number for m in spills)
                if pool.num_moving != moving:
                    raise InvariantError(f"{pool.name}: {pool.num_moving} blocks are spilled, not {moving}")
                if number != DEVICE:
                    pool.check_integrity(self.holders(g, number))
