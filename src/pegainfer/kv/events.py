"""KV events of the block pools of one data-parallel rank.

Every change of a pool's index becomes an event, also in the pools of tiers. A pool knows only hashes, so the
manager describes the tokens of a block before the pool publishes it. The description is kept as long as any
pool has the block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from pegainfer.contract.kv_events import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventSink,
)
from pegainfer.contract.step import PageGroup, StateGroup
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.tables import SequenceBlocks
from pegainfer.kv.tiers import Tiers

HASH_BITS = 64


class Content(NamedTuple):
    """What a block holds."""

    parent: bytes | None  # hash of the block before
    tokens: Sequence[int]
    adapter: str | None
    extra: tuple[str, ...] | None


# Of blocks that no sequence of this run has described: from an earlier run's disk tier, or from a peer.
UNKNOWN = Content(None, (), None, None)


class GroupEvents:
    """Events of one group of pages. Not thread safe."""

    def __init__(self, number: int, group: PageGroup) -> None:
        self._number = number
        self._group = group
        self._content: dict[bytes, Content] = {}
        self._pools: dict[bytes, int] = {}  # how many pools have a block
        self.events: list[KVEvent] = []

    def watch(self, kind: str, pool: BlockPool) -> None:
        """Reports the blocks that the pool has now, and its changes from now on. `kind`: a key of MEDIA."""
        pool.observe(partial(self._stored, kind), partial(self._removed, kind))

    def describe(self, seq: SequenceBlocks, tokens: array[int], unit: int, unit_tokens: int) -> None:
        """Records the content of a sequence's block that ends with `unit`, before a pool publishes it.

        Args:
            unit: index of a hash of the sequence, which stands for `unit_tokens` tokens.
        """
        end = (unit + 1) * unit_tokens
        before = unit - self._group.block_size // unit_tokens
        # Only the first block's hash is made with the salt itself.
        extra = (seq.adapter, seq.cache_salt if before < 0 else "")
        content = Content(
            seq.hashes[before] if before >= 0 else None,
            tokens[end - self._group.block_size : end],
            seq.adapter,
            tuple(name for name in extra if name) or None,
        )
        self._content.setdefault(seq.hashes[unit], content)

    def _stored(self, kind: str, key: bytes) -> None:
        """A pool of this kind has the block from now on."""
        self._pools[key] = self._pools.get(key, 0) + 1
        content = self._content.get(key, UNKNOWN)
        medium, last = MEDIA[kind], self.events[-1] if self.events else None
        if (
            isinstance(last, BlockStored)
            and last.extra_keys is not None
            and last.token_ids  # else its block is UNKNOWN, and these tokens would be taken for that block's
            and last.medium == medium
            and content.parent is not None
            and last.block_hashes[-1] == external(content.parent)
        ):
            last.block_hashes.append(external(key))
            last.token_ids.extend(content.tokens)
            last.extra_keys.append(content.extra)
            return
        window = self._group.window
        self.events.append(
            BlockStored(
                block_hashes=[external(key)],
                parent_block_hash=None if content.parent is None else external(content.parent),
                token_ids=list(content.tokens),
                block_size=self._group.block_size,
                medium=medium,
                lora_name=content.adapter,
                extra_keys=[content.extra],
                group_idx=self._number,
                kv_cache_spec_kind="sliding_window" if window else "full_attention",
                kv_cache_spec_sliding_window=window or None,
            )
        )

    def _removed(self, kind: str, key: bytes) -> None:
        """A pool of this kind no longer has the block."""
        self._pools[key] -= 1
        if not self._pools[key]:
            del self._pools[key]
            self._content.pop(key, None)
        medium, last = MEDIA[kind], self.events[-1] if self.events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(external(key))
        else:
            self.events.append(
                BlockRemoved(block_hashes=[external(key)], medium=medium, group_idx=self._number)
            )

    def clear(self) -> None:
        """Forgets everything, pending events too: no pool has a block after a reset."""
        self._content.clear()
        self._pools.clear()
        self.events.clear()


class KVEvents:
    """Events of all groups of pages of one rank, published once a step. Recurrent states have none."""

    def __init__(
        self,
        sink: KVEventSink,
        rank: int,
        groups: Sequence[PageGroup | StateGroup],
        pools: Sequence[BlockPool],
        unit: int,
        tiers: Tiers | None,
    ) -> None:
        """
        Args:
            pools: of the device, by group.
            unit: tokens that one hash of a sequence stands for.
        """
        self._sink = sink
        self._rank = rank
        self._unit = unit
        self._groups: dict[int, GroupEvents] = {}
        self._cleared = False
        for g, (group, pool) in enumerate(zip(groups, pools, strict=True)):
            if isinstance(group, PageGroup):
                events = self._groups[g] = GroupEvents(g, group)
                events.watch("device", pool)
                for kind, lower in () if tiers is None else tiers.kept_pools(g):
                    events.watch(kind, lower)

    def describe(self, g: int, seq: SequenceBlocks, tokens: array[int], unit: int) -> None:
        """Records the content of a sequence's block; see GroupEvents.describe."""
        self._groups[g].describe(seq, tokens, unit, self._unit)

    def reset(self) -> None:
        """The prefix cache was reset in every tier."""
        self._cleared = True
        for group in self._groups.values():
            group.clear()
        self.flush()

    def flush(self) -> None:
        """Publishes what has changed since the last call."""
        events: list[KVEvent] = [AllBlocksCleared()] if self._cleared else []
        self._cleared = False
        for group in self._groups.values():
            events += group.events
            group.events = []
        if events:
            self._sink.publish(events, self._rank)


def external(key: bytes) -> int:
    """The number under which others know a block: the last 64 bits of its hash."""
    return int.from_bytes(key[-HASH_BITS // 8 :], "big")
