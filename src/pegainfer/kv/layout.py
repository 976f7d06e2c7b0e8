"""What the block sizes of a line's KV groups have to do with each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import KVSpec, PageGroup, StateGroup


class Layout(NamedTuple):
    """Counts of tokens."""

    unit: int  # covered by one hash
    stride: int  # between two positions that a prefix hit can have; states can be kept at any of them
    every: int  # between two states that a prompt keeps in any case; 0: no state is ever kept


def group_bytes(spec: KVSpec) -> list[int]:
    """Bytes of a block or state of each group."""
    return [g.bytes_per_block if isinstance(g, PageGroup) else g.bytes_per_state for g in spec.groups]


def layout_of(groups: Sequence[PageGroup | StateGroup]) -> Layout:
    """Raises ConfigError where the sizes do not fit together."""
    sizes = [group.block_size for group in groups if isinstance(group, PageGroup)]
    states = [group.snapshot_every for group in groups if isinstance(group, StateGroup)]
    snapshots = [every for every in states if every]
    unit = min(sizes or snapshots or [1])
    for size in sizes + snapshots:
        if size < 1 or size % unit:
            raise ConfigError("block sizes do not fit together", expected=f"multiples of {unit}", got=size)
    for every in snapshots:
        if any(every % size for size in sizes):
            raise ConfigError(
                "snapshot_every must be a multiple of each block size", expected=sizes, got=every
            )
    kept = bool(states) and len(snapshots) == len(states)
    return Layout(unit, math.lcm(*sizes) if sizes else unit, math.lcm(*snapshots) if kept else 0)
