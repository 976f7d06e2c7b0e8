"""One sequence's view of the KV pools."""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 1 << 62  # positions; the reach of a sequence that has no page group


class SequenceBlocks:
    """One sequence's block tables. Owned by the sequence from `begin` or `fork` until `release`."""

    __slots__ = ("capacity", "firsts", "hashes", "published", "root", "tables")

    def __init__(self, root: bytes, hashes: Sequence[bytes], num_groups: int) -> None:
        self.root = root  # parent of the first hash
        self.hashes = list(hashes)  # one a full unit, of prompt tokens and of what was computed since
        self.published = 0  # units that were offered to the prefix index
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.firsts = [0] * num_groups  # window groups: blocks before this one were released
        self.capacity = 0  # positions that every page group's table covers


Growth = list[tuple[int, tuple[int, ...]]]  # (group, blocks appended)
