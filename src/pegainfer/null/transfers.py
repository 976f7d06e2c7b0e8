"""Transfers of the null device: they take some steps, may fail, and blocks on their way are nobody else's."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.tiers import DEVICE, Tier, Transfer

Content = list[int] | tuple[int, int] | None  # chains of a page; length and chain of a state; None: undefined


@dataclass(slots=True)
class _Move:
    transfer: Transfer
    content: Content
    steps: int  # results until it ends
    fails: bool
    lost: bool = False  # the tiers were reset meanwhile


class NullTransfers:
    """Contents of the lower tiers, and what is on its way between them and the device."""

    def __init__(
        self,
        tiers: tuple[Tier, ...],
        device_blocks: tuple[int, ...],
        *,
        most_steps: int,
        failures: float,
        seed: int,
    ) -> None:
        """
        Args:
            most_steps: a transfer ends with one of the next so many results.
            failures: share of transfers that fail.
        """
        self._sizes = [device_blocks, *(tier.num_blocks for tier in tiers)]
        self._contents: list[dict[tuple[int, int], Content]] = [{} for _ in self._sizes]
        self._most_steps = most_steps
        self._failures = failures
        self._rng = random.Random(seed)
        self._keys: dict[tuple[int, int, int], bytes] = {}  # of blocks in lower tiers: (pool, group, block)
        self._moves: list[_Move] = []
        self._last_id = 0
        self.moving: dict[tuple[int, int], int] = {}  # device (group, block) -> transfers that hold it

    def __len__(self) -> int:
        return len(self._moves)

    def start(self, t: Transfer, content: Content) -> None:
        """Raises InvariantError for a wrong transfer. `content`: of a source on the device."""
        if t.id <= self._last_id:
            raise InvariantError(f"{t} follows transfer {self._last_id}")
        self._last_id = t.id
        if t.source_pool == t.target_pool:
            raise InvariantError(f"{t} stays in its pool")
        for pool, block in ((t.source_pool, t.source), (t.target_pool, t.target)):
            if not 0 <= pool < len(self._sizes) or not 0 <= block < self._sizes[pool][t.group]:
                raise InvariantError(f"{t} names block {block} of pool {pool}, which does not exist")
        if t.source_pool != DEVICE:
            content = self._contents[t.source_pool].get((t.group, t.source))
            if content is not None and self._keys[t.source_pool, t.group, t.source] != t.key:
                raise InvariantError(f"{t} reads a block that was written for another prefix")
        if content is None:
            raise InvariantError(f"{t} reads a block that was never written")
        for move in self._moves:
            o = move.transfer
            ends = ((o.source_pool, o.source), (o.target_pool, o.target))
            if o.group == t.group and (t.target_pool, t.target) in ends:
                raise InvariantError(f"{t} overwrites a block that {o} still holds")
            if o.group == t.group and (t.source_pool, t.source) == ends[1]:
                raise InvariantError(f"{t} reads the target of {o}, which has not landed")
        if t.target_pool != DEVICE:
            self._contents[t.target_pool][t.group, t.target] = None
        fails = self._rng.random() < self._failures
        self._moves.append(_Move(t, content, self._rng.randint(1, self._most_steps), fails))
        for place in self._device_blocks(t):
            self.moving[place] = self.moving.get(place, 0) + 1

    def reset(self) -> None:
        """The tiers hold nothing any more; of what is on its way, that to the device alone arrives."""
        for contents in self._contents:
            contents.clear()
        for move in self._moves:
            move.lost = True

    def end_some(self, *, at_least_one: bool) -> tuple[list[tuple[Transfer, Content]], list[Transfer]]:
        """A result is made: transfers that have landed with their contents, and those that have failed."""
        for move in self._moves:
            move.steps -= 1
        if at_least_one and self._moves:
            self._rng.choice(self._moves).steps = 0
        ended = [move for move in self._moves if move.steps <= 0]
        self._moves = [move for move in self._moves if move.steps > 0]
        landed: list[tuple[Transfer, Content]] = []
        failed: list[Transfer] = []
        for move in ended:
            t = move.transfer
            for place in self._device_blocks(t):
                self.moving[place] -= 1
                if not self.moving[place]:
                    del self.moving[place]
            if move.fails:
                failed.append(t)
                continue
            landed.append((t, move.content))
            if t.target_pool != DEVICE and not move.lost:
                self._contents[t.target_pool][t.group, t.target] = move.content
                self._keys[t.target_pool, t.group, t.target] = t.key
        return landed, failed

    @staticmethod
    def _device_blocks(t: Transfer) -> list[tuple[int, int]]:
        ends = ((t.source_pool, t.source), (t.target_pool, t.target))
        return [(t.group, block) for pool, block in ends if pool == DEVICE]
