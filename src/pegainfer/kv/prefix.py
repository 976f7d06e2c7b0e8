"""The longest cached prefix of a prompt that is valid in every KV group at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pegainfer.contract.step import NO_BLOCK, PageGroup, StateGroup


class Index(Protocol):
    """Finds blocks by the hash of the prefix that they end; one device pool, or all tiers of a group."""

    def lookup(self, key: bytes) -> int | None: ...

    def lookup_run(self, keys: Sequence[bytes]) -> list[int]: ...


class PrefixHit(msgspec.Struct, frozen=True):
    """What a new sequence may reuse. No references are held yet."""

    num_tokens: int
    # by group: for pages one id a block (NO_BLOCK before the window); for a state the snapshot to copy
    blocks: tuple[tuple[int, ...], ...]


def first_in_window(group: PageGroup, position: int) -> int:
    """Index of the first block that computing `position` or any later one can read.

    A token at p reads the last `window` positions, itself included: p - window + 1 .. p.
    """
    if group.window == 0:
        return 0
    return max(0, position - group.window + 1) // group.block_size


def find_prefix(
    groups: Sequence[PageGroup | StateGroup],
    pools: Sequence[Index],
    unit: int,
    hashes: Sequence[bytes],
    num_tokens: int,
) -> PrefixHit:
    """Finds the longest prefix of at most `num_tokens` - 1 tokens, so that one token is left to compute.

    Args:
        unit: tokens a hash; every page group's block size is a multiple of it.
        hashes: chained, one for each full unit of the prompt. A hash stands for the whole prefix that ends
            there, so a larger block or a state is found by the hash at its end.

    States may be kept at any block boundary, so every boundary is tried, the last one first.
    """
    miss = PrefixHit(0, tuple(() for _ in groups))
    longest = min(len(hashes), (num_tokens - 1) // unit) * unit
    stride = unit
    found: list[list[int]] = [[] for _ in groups]
    for g, group in enumerate(groups):
        if isinstance(group, StateGroup):
            if group.snapshot_every == 0:
                return miss
            continue
        stride = math.lcm(stride, group.block_size)
        if group.window == 0:
            found[g] = _run_of_hits(group, pools[g], unit, hashes, longest)
            longest = min(longest, len(found[g]) * group.block_size)
    longest -= longest % stride
    runs = {
        g: _runs(group, pools[g], unit, hashes, longest)
        for g, group in enumerate(groups)
        if isinstance(group, PageGroup) and group.window > 0
    }
    for length in range(longest, 0, -stride):
        key = hashes[length // unit - 1]
        for g, group in enumerate(groups):
            if isinstance(group, StateGroup):
                if pools[g].lookup(key) is None:
                    break
            elif group.window > 0:
                blocks = length // group.block_size
                if runs[g][blocks] < blocks - first_in_window(group, length):
                    break
        else:
            return PrefixHit(
                length,
                tuple(
                    _blocks_at(group, pools[g], unit, hashes, length, found[g])
                    for g, group in enumerate(groups)
                ),
            )
    return miss


def _run_of_hits(
    group: PageGroup, pool: Index, unit: int, hashes: Sequence[bytes], longest: int
) -> list[int]:
    """Blocks from the start of the prompt up to the first miss."""
    ratio = group.block_size // unit
    return pool.lookup_run(hashes[ratio - 1 : longest // group.block_size * ratio : ratio])


def _runs(group: PageGroup, pool: Index, unit: int, hashes: Sequence[bytes], longest: int) -> list[int]:
    """For each block boundary, how many consecutive blocks before it are there."""
    ratio = group.block_size // unit
    out = [0]
    for i in range(longest // group.block_size):
        out.append(out[-1] + 1 if pool.lookup(hashes[(i + 1) * ratio - 1]) is not None else 0)
    return out


def _blocks_at(
    group: PageGroup | StateGroup,
    pool: Index,
    unit: int,
    hashes: Sequence[bytes],
    length: int,
    found: list[int],
) -> tuple[int, ...]:
    """The group's table for a prefix of `length` tokens that is known to be there."""
    if isinstance(group, StateGroup):
        return (_must(pool, hashes[length // unit - 1]),)
    blocks = length // group.block_size
    if group.window == 0:
        return tuple(found[:blocks])
    ratio = group.block_size // unit
    first = first_in_window(group, length)
    kept = tuple(_must(pool, hashes[(i + 1) * ratio - 1]) for i in range(first, blocks))
    return (NO_BLOCK,) * first + kept


def _must(pool: Index, key: bytes) -> int:
    block = pool.lookup(key)
    assert block is not None
    return block
