"""Block tables of sequences over all KV groups: allocate, publish, fork, trim, release."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import hash_blocks, pack_tokens
from pegainfer.contract.step import NO_BLOCK, BlockCopy, KVSpec, PageGroup, StateGroup
from pegainfer.contract.tiers import Tier
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.integrity import check_group
from pegainfer.kv.layout import layout_of
from pegainfer.kv.prefix import PrefixHit, find_prefix, first_in_window
from pegainfer.kv.states import StateKeeper
from pegainfer.kv.tables import UNBOUNDED, Growth, SequenceBlocks, held

if TYPE_CHECKING:
    from pegainfer.kv.events import KVEvents
    from pegainfer.kv.tiers import Tiers


class KVManager:
    """Bookkeeping only: it knows ids and hashes, never memory. Not thread safe."""

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: Sequence[int],
        *,
        prefix_cache: bool = True,
        tiers: Sequence[Tier] = (),
        rank: int = 0,
        ids: Iterator[int] | None = None,
    ) -> None:
        """Raises ConfigError where groups, their sizes and the block counts do not fit together.

        Args:
            num_blocks: by group, on the device.
            rank: the data-parallel rank whose pools these are.
            ids: of transfers; ranks share them.
        """
        if not spec.groups or len(spec.groups) != len(num_blocks):
            raise ConfigError("KV groups and block counts differ", expected=len(spec.groups), got=num_blocks)
        self.groups = spec.groups
        self._rank = rank
        self.prefix_cache = prefix_cache
        self.pools = tuple(BlockPool(g.name, n) for g, n in zip(spec.groups, num_blocks, strict=True))
        # Tokens that one hash covers, and tokens between two positions that a hit can have.
        self.unit, self.stride, every = layout_of(spec.groups)
        self._pages = [
            (g, group, self.pools[g]) for g, group in enumerate(self.groups) if isinstance(group, PageGroup)
        ]
        self._states = [(g, s, self.pools[g]) for g, s in enumerate(self.groups) if isinstance(s, StateGroup)]
        # None where no state is ever kept.
        self.states = (
            StateKeeper(self._states, self.unit, self.stride, every) if prefix_cache and every else None
        )
        self.tiers: Tiers | None = None
        if prefix_cache and tiers:
            from pegainfer.kv.tiers import Tiers

            self.tiers = Tiers(spec.groups, self.pools, self.unit, tiers, rank, ids or itertools.count(1))
        self._windows = [entry for entry in self._pages if entry[1].window > 0]
        self.has_windows = bool(self._windows)
        self._live: set[SequenceBlocks] = set()
        self._epoch = 0  # how often the prefix cache was reset
        self.events: KVEvents | None = None  # of blocks that prompts can find; None: not published

    # What fits

    def reach_alone(self, max_commit: int) -> int:
        """Positions that one sequence can cover when it has every pool to itself."""
        reach = UNBOUNDED
        for _, group, pool in self._pages:
            span = -(-(group.window - 1 + max_commit) // group.block_size) + 1
            if group.window == 0 or pool.num_blocks < span:
                reach = min(reach, pool.num_blocks * group.block_size)
        if any(pool.num_blocks < 1 for _, _, pool in self._states):
            return 0
        return reach

    def room(self, seq: SequenceBlocks, *, with_deferred: bool = False) -> int:
        """Positions that the tables of `seq` can be grown to now, or once what is in flight has ended."""
        room = UNBOUNDED
        for g, group, pool in self._pages:
            blocks = len(seq.tables[g]) + pool.available
            if with_deferred:
                blocks += pool.num_deferred + pool.num_moving
            room = min(room, blocks * group.block_size)
        return room

    def num_available(self) -> int:
        """Blocks that can be handed out now, summed over groups."""
        return sum(pool.available for pool in self.pools)

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest usable prefix; empty with the prefix cache off."""
        return find_prefix(self.groups, self.pools, self.unit, hashes, num_tokens if self.prefix_cache else 0)

    def cached_tokens(self, hashes: Sequence[bytes], num_tokens: int, hit: PrefixHit) -> int:
        """Tokens of the longest usable prefix in any tier; `hit` is what `find` found for the same tokens."""
        below = 0 if self.tiers is None else self.tiers.find(hashes, num_tokens)
        return max(hit.num_tokens, below)

    # The life of a sequence's tables

    def reach(self, hit: PrefixHit, spare: Sequence[int]) -> int:
        """Positions that a new sequence starting with `hit` can cover now if `spare[g]` blocks must stay."""
        reach = UNBOUNDED
        for g, group in enumerate(self.groups):
            free = self._left_by(hit, g) - spare[g]
            if isinstance(group, StateGroup):
                if free < 1:
                    return 0
            else:
                reach = min(reach, (len(hit.blocks[g]) + max(0, free)) * group.block_size)
        return reach

    def fits(self, hit: PrefixHit, positions: int, chunk: int, spare: Sequence[int]) -> bool:
        """Whether a new sequence could be computed up to `positions` now, `chunk` at a time."""
        for g, group in enumerate(self.groups):
            need = 1
            if isinstance(group, PageGroup):
                need = -(-positions // group.block_size) - len(hit.blocks[g])
                if group.window:
                    need = min(need, -(-(group.window + chunk) // group.block_size) + 1)
            if self._left_by(hit, g) - need < spare[g]:
                return False
        return True

    def _left_by(self, hit: PrefixHit, g: int) -> int:
        """Available blocks of a group once the hit's cached blocks are revived."""
        return self.pools[g].available - self.pools[g].num_idle(held(hit.blocks[g]))

    def begin(
        self, root: bytes, hashes: Sequence[bytes], hit: PrefixHit, positions: int, *, step: int
    ) -> tuple[SequenceBlocks, list[BlockCopy]]:
        """Tables that start with `hit` and cover `positions`, with the state copies that plan `step` must do.

        The caller made sure by `reach` or `fits` that the blocks are there.
        """
        seq = SequenceBlocks(root, hashes, len(self.groups), self._epoch)
        copies: list[BlockCopy] = []
        # All hits are acquired first: an allocation may evict what nobody holds.
        for pool, kept in zip(self.pools, hit.blocks, strict=True):
            pool.acquire(*held(kept))
        for g, group in enumerate(self.groups):
            pool, kept, table = self.pools[g], hit.blocks[g], seq.tables[g]
            if isinstance(group, StateGroup):
                table.append(pool.allocate())
                for snapshot in kept:
                    copies.append(BlockCopy(g, snapshot, table[0], self._rank))
                    pool.release(snapshot, after=step)
                continue
            table.extend(kept)
            table.extend(pool.allocate() for _ in range(-(-positions // group.block_size) - len(kept)))
            seq.firsts[g] = len(kept) - len(held(kept))
        seq.published = hit.num_tokens // self.unit
        self._set_capacity(seq)
        self._live.add(seq)
        return seq, copies

    def grow(self, seq: SequenceBlocks, positions: int) -> Growth:
        """Appends blocks until `positions` are covered. The caller made sure of room."""
        growth: Growth = []
        for g, group, pool in self._pages:
            table = seq.tables[g]
            need = -(-positions // group.block_size) - len(table)
            if need > 0:
                blocks = tuple(pool.allocate() for _ in range(need))
                table.extend(blocks)
                growth.append((g, blocks))
        self._set_capacity(seq)
        return growth

    def fork(
        self, parent: SequenceBlocks, computed: int, positions: int, *, step: int
    ) -> tuple[SequenceBlocks, list[BlockCopy]] | None:
        """A second sequence with the parent's first `computed` positions, with tables that cover `positions`.

        Full blocks are shared by reference; a partial block and states are copied by plan `step`, before its
        rows run. None, and nothing changed, where the blocks are not there.
        """
        for _, page, pool in self._pages:
            if pool.available < -(-positions // page.block_size) - computed // page.block_size:
                return None
        if any(pool.available < 1 for _, _, pool in self._states):
            return None
        hashes = parent.hashes[: computed // self.unit]
        child = SequenceBlocks(parent.root, hashes, len(self.groups), parent.epoch)
        child.owner, child.adapter, child.cache_salt = parent.owner, parent.adapter, parent.cache_salt
        child.published = len(child.hashes)  # the parent publishes them
        copies: list[BlockCopy] = []
        for g, group in enumerate(self.groups):
            pool, table, source = self.pools[g], child.tables[g], parent.tables[g]
            if isinstance(group, StateGroup):
                self._copy(g, source[0], table, step, copies)
                continue
            full = computed // group.block_size
            child.firsts[g] = parent.firsts[g]
            pool.acquire(*held(source[:full]))
            table.extend(source[:full])
            if computed % group.block_size:
                self._copy(g, source[full], table, step, copies)
            table.extend(pool.allocate() for _ in range(-(-positions // group.block_size) - len(table)))
        self._set_capacity(child)
        self._live.add(child)
        return child, copies

    def release(self, seq: SequenceBlocks, after: int) -> None:
        """Gives all blocks back once step `after` is retired. The tables stay readable for `publish`."""
        self._live.remove(seq)
        seq.released = True
        if self.states is not None:
            self.states.release(seq, after)
        for pool, table in zip(self.pools, seq.tables, strict=True):
            # The tail goes first, so that the head of a prefix is evicted last.
            pool.release(*held(table)[::-1], after=after)

    def trim(self, seq: SequenceBlocks, computed: int, after: int) -> None:
        """Releases window blocks that no row from position `computed` on can read."""
        for g, group, pool in self._windows:
            first = first_in_window(group, computed)
            table = seq.tables[g]
            for i in range(seq.firsts[g], min(first, len(table))):
                pool.release(table[i], after=after)
                table[i] = NO_BLOCK
            seq.firsts[g] = max(seq.firsts[g], min(first, len(table)))

    # The prefix index

    def publish(self, seq: SequenceBlocks, tokens: array[int], computed: int) -> None:
        """Offers the blocks and states of the first `computed` positions to later requests.

        Called at commit, when it is certain what the blocks hold; hashes of generated tokens are made here.
        """
        units = computed // self.unit
        if not self.prefix_cache or units <= seq.published:
            return
        self.extend_hashes(seq, tokens, units)
        current = seq.epoch == self._epoch
        if self.states is not None and seq.pending:
            self.states.resolve(seq, computed, publish=current)
        for i in range(seq.published, units) if current else ():
            end = (i + 1) * self.unit
            for g, group, pool in self._pages:
                if end % group.block_size == 0:
                    block = seq.tables[g][end // group.block_size - 1]
                    if block != NO_BLOCK:
                        if self.events is not None:
                            self.events.describe(g, seq, tokens, i)
                        pool.publish(block, seq.hashes[i], seq.owner)
        seq.published = units

    def extend_hashes(self, seq: SequenceBlocks, tokens: array[int], units: int) -> None:
        """Hashes tokens until `units` hashes are known."""
        known = len(seq.hashes)
        if known >= units:
            return
        parent = seq.hashes[-1] if known else seq.root
        part = pack_tokens(tokens[known * self.unit : units * self.unit])
        seq.hashes += hash_blocks(part, self.unit, parent=parent)

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached in every tier; sequences that have begun publish nothing any more."""
        self._epoch += 1
        for pool in self.pools:
            pool.forget_all()
        if self.tiers is not None:
            self.tiers.reset()
        if self.events is not None:
            self.events.reset()

    def retire(self, step: int) -> None:
        """Step `step` is committed; what was released after it becomes free."""
        for pool in self.pools:
            pool.retire(step)

    def _copy(self, g: int, source: int, table: list[int], step: int, copies: list[BlockCopy]) -> None:
        pool = self.pools[g]
        pool.acquire(source)
        pool.release(source, after=step)
        table.append(pool.allocate())
        copies.append(BlockCopy(g, source, table[-1], self._rank))

    def _set_capacity(self, seq: SequenceBlocks) -> None:
        seq.capacity = min((len(seq.tables[g]) * p.block_size for g, p, _ in self._pages), default=UNBOUNDED)

    def check_integrity(self) -> None:
        """Raises InvariantError unless tables, snapshots, transfers and plans account for every reference."""
        for g, group in enumerate(self.groups):
            moving = Counter[int]() if self.tiers is None else self.tiers.held_on_device(g)
            check_group(g, group, self.pools[g], self._live, moving)
        if self.tiers is not None:
            self.tiers.check_integrity()
