"""One sequence's view of the KV pools."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pegainfer.contract.step import NO_BLOCK
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.eviction import NOBODY

UNBOUNDED = 1 << 62  # positions; the reach of a sequence that has no page group


class PendingState(msgspec.Struct):
    """A snapshot whose position no committed row has passed yet. It owns its states."""

    position: int  # tokens
    states: list[tuple[int, BlockPool, int]]  # (group, pool, state), one for each state group
    step: int  # the last plan that names it
    rolling: bool  # taken while decoding


class SequenceBlocks:
    """One sequence's block tables. Owned by the sequence from `begin` or `fork` until `release`."""

    __slots__ = (
        "adapter",
        "cache_salt",
        "capacity",
        "epoch",
        "firsts",
        "hashes",
        "owner",
        "pending",
        "published",
        "released",
        "rolling",
        "root",
        "tables",
    )

    def __init__(self, root: bytes, hashes: Sequence[bytes], num_groups: int, epoch: int = 0) -> None:
        self.owner = NOBODY  # of the blocks that it publishes
        self.root = root  # parent of the first hash
        # The request's adapter and salt, from which the root was made; KV events name them.
        self.adapter: str | None = None
        self.cache_salt = ""
        self.hashes = list(hashes)  # one a full unit, of prompt tokens and of what was computed since
        self.published = 0  # units that were offered to the prefix index
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.firsts = [0] * num_groups  # window groups: blocks before this one were released
        self.capacity = 0  # positions that every page group's table covers
        self.pending: list[PendingState] = []
        # The newest state that was kept while decoding: (pool, state, hash).
        self.rolling: list[tuple[BlockPool, int, bytes]] = []
        self.epoch = epoch  # resets of the prefix cache before it began
        self.released = False


Growth = list[tuple[int, tuple[int, ...]]]  # (group, blocks appended)


def held(table: Sequence[int]) -> Sequence[int]:
    """A table's blocks without what lies before a window."""
    return table if not table or table[0] != NO_BLOCK else [b for b in table if b != NO_BLOCK]
