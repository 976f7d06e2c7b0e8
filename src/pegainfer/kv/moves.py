"""Transfers that the bookkeeping has started and that have not ended, with what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pegainfer.contract.step import PageGroup, StateGroup
from pegainfer.contract.tiers import Transfer
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.levels import Levels


class Load(msgspec.Struct, eq=False):
    """Transfers that bring a prefix to the device, for one sequence or several.

    It holds blocks until the last has ended.
    """

    owners: list[Any]  # the sequences that wait for it; they may have ended meanwhile
    transfers: list[Transfer] = msgspec.field(default_factory=list)
    left: int = 0  # transfers that have not ended
    failed: bool = False  # one of the transfers did
    held: list[tuple[BlockPool, int]] = msgspec.field(default_factory=list)  # on the device, referenced once


class Move(msgspec.Struct, frozen=True):
    """A transfer in flight; it holds one reference to its source and one to its target."""

    transfer: Transfer
    epoch: int  # resets of the prefix cache before it began
    load: Load | None  # None: a spill, a save or a prefetch
    evict: bool  # whether the source is the next to be evicted once it has landed


class Moves:
    """Starts transfers of one data-parallel rank. The caller takes the references that a move holds."""

    def __init__(
        self,
        groups: Sequence[PageGroup | StateGroup],
        levels: Sequence[Levels],
        unit: int,
        rank: int,
        ids: Iterator[int],
    ) -> None:
        """
        Args:
            levels: by group.
            unit: tokens that one hash covers.
            ids: of transfers, shared by all ranks.
        """
        self.groups = groups
        self.levels = levels
        self.unit = unit
        self.epoch = 0  # resets of the prefix cache
        self.under_way: dict[int, Move] = {}  # by transfer id
        # What is on its way, by group, target pool and key.
        self._coming: dict[tuple[int, int, bytes], Move] = {}
        self._rank = rank
        self._ids = ids

    def start(
        self,
        g: int,
        source: tuple[int, int],
        target: tuple[int, int],
        key: bytes,
        load: Load | None = None,
        *,
        evict: bool = False,
    ) -> Transfer:
        """`source`, `target`: pool number and block; see Move."""
        transfer = Transfer(next(self._ids), g, *source, *target, self._rank, key)
        move = self.under_way[transfer.id] = Move(transfer, self.epoch, load, evict)
        self._coming.setdefault((g, target[0], key), move)
        return transfer

    def coming(self, g: int, pool: int, key: bytes) -> Move | None:
        """The transfer that brings a block of this key to a pool; None too where it will be forgotten."""
        move = self._coming.get((g, pool, key))
        return move if move is not None and move.epoch == self.epoch else None

    def end(self, transfer_id: int) -> Move | None:
        """A transfer has ended; None where it is none of this rank."""
        move = self.under_way.pop(transfer_id, None)
        if move is not None:
            t = move.transfer
            place = (t.group, t.target_pool, t.key)
            if self._coming.get(place) is move:
                del self._coming[place]
        return move

    def key_of(self, g: int, i: int, hashes: Sequence[bytes], num_tokens: int) -> bytes:
        """The key of entry `i` of a group's table, in a hit of `num_tokens`."""
        group = self.groups[g]
        end = num_tokens if isinstance(group, StateGroup) else (i + 1) * group.block_size
        return hashes[end // self.unit - 1]

    def holders(self, g: int, number: int) -> Counter[int]:
        """References to blocks of a pool that transfers and loads account for."""
        found: Counter[int] = Counter()
        loads: dict[int, Load] = {}
        for move in self.under_way.values():
            t = move.transfer
            if t.group == g:
                found.update([t.source] if t.source_pool == number else [])
                found.update([t.target] if t.target_pool == number else [])
            if move.load is not None:
                loads[id(move.load)] = move.load
        pool = self.levels[g].pools[number]
        found.update(block for load in loads.values() for held, block in load.held if held is pool)
        return found
