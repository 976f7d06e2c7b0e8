"""The invariants of one KV group: who holds which block, and what a table may look like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import NO_BLOCK, PageGroup, StateGroup
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.tables import SequenceBlocks


def check_group(
    g: int,
    group: PageGroup | StateGroup,
    pool: BlockPool,
    live: Collection[SequenceBlocks],
    moving: Counter[int],
) -> None:
    """Raises InvariantError unless live tables, snapshots, transfers and plans in flight hold every block.

    Args:
        g: the group's number.
        live: the sequences that have tables.
        moving: references that transfers and loads hold.
    """
    tables = Counter(block for seq in live for block in seq.tables[g] if block != NO_BLOCK)
    snapshots = [state for seq in live for p in seq.pending for group_, _, state in p.states if group_ == g]
    pool.check_integrity(tables + Counter(snapshots) + moving)
    for seq in live:
        table = seq.tables[g]
        if isinstance(group, StateGroup):
            if len(table) != 1 or tables[table[0]] != 1:
                raise InvariantError(f"KV group '{group.name}': a sequence's state is missing or shared")
        elif any((b == NO_BLOCK) != (i < seq.firsts[g]) for i, b in enumerate(table)):
            raise InvariantError(f"KV group '{group.name}': released blocks and the window disagree")
        if seq.published > len(seq.hashes):
            raise InvariantError("more units are published than hashed")
