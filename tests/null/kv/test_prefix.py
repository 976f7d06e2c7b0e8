"""The longest prefix that is valid in every group, group by group and against brute force."""

from __future__ import annotations

import random

import pytest

from pegainfer.contract.step import NO_BLOCK, PageGroup, StateGroup
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.prefix import PrefixHit, find_prefix, first_in_window

FULL = PageGroup(name="full", block_size=4, bytes_per_block=1)
WIDE = PageGroup(name="wide", block_size=8, bytes_per_block=1)
WINDOW = PageGroup(name="window", block_size=4, bytes_per_block=1, window=6)
STATE = StateGroup(name="state", bytes_per_state=1, snapshot_every=8)

Group = PageGroup | StateGroup
HASHES = [bytes([i]) * 32 for i in range(10)]


class Cache:
    """Pools in which the block that ends at `end` tokens is present where a test says so."""

    def __init__(self, *groups: Group) -> None:
        self.groups = groups
        self.pools = [BlockPool(g.name, 16) for g in groups]

    def put(self, g: int, *ends: int) -> dict[int, int]:
        """Publishes blocks or states by the token count at their end; returns their ids."""
        out = {}
        for end in ends:
            out[end] = self.pools[g].allocate()
            self.pools[g].publish(out[end], HASHES[end // 4 - 1])
        return out

    def find(self, num_tokens: int, num_hashes: int = 10) -> PrefixHit:
        return find_prefix(self.groups, self.pools, 4, HASHES[:num_hashes], num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 12)]
)
def test_at_least_one_token_is_left_to_compute(num_tokens: int, expected: int) -> None:
    cache = Cache(FULL)
    ids = cache.put(0, 4, 8, 12)
    hit = cache.find(num_tokens)
    assert hit.num_tokens == expected
    assert hit.blocks == (tuple(ids[end] for end in range(4, expected + 1, 4)),)


def test_full_attention_needs_every_block() -> None:
    cache = Cache(FULL)
    cache.put(0, 4, 12)
    assert cache.find(40).num_tokens == 4


def test_hashes_bound_the_hit() -> None:
    cache = Cache(FULL)
    cache.put(0, 4, 8, 12)
    assert cache.find(40, num_hashes=2).num_tokens == 8


def test_blocks_of_several_units_are_found_by_the_hash_at_their_end() -> None:
    cache = Cache(FULL, WIDE)
    cache.put(0, 4, 8, 12, 16, 20)
    wide = cache.put(1, 8, 16)
    hit = cache.find(40)
    assert hit.num_tokens == 16
    assert hit.blocks[1] == (wide[8], wide[16])


@pytest.mark.parametrize(("position", "first"), [(0, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
def test_first_block_in_a_window_of_six(position: int, first: int) -> None:
    assert first_in_window(WINDOW, position) == first


def test_a_window_group_needs_only_the_window() -> None:
    cache = Cache(FULL, WINDOW)
    cache.put(0, 4, 8, 12, 16)
    ids = cache.put(1, 12, 16)
    hit = cache.find(40)
    # Computing position 16 reads positions 11 to 15: blocks 2 and 3.
    assert hit.num_tokens == 16
    assert hit.blocks[1] == (NO_BLOCK, NO_BLOCK, ids[12], ids[16])


def test_a_hole_in_the_window_shortens_the_hit() -> None:
    cache = Cache(FULL, WINDOW)
    cache.put(0, 4, 8, 12, 16)
    cache.put(1, 4, 8, 16)
    assert cache.find(40).num_tokens == 8


def test_a_state_group_needs_a_snapshot_at_the_boundary() -> None:
    cache = Cache(FULL, STATE)
    cache.put(0, 4, 8, 12, 16, 20)
    assert cache.find(40).num_tokens == 0
    states = cache.put(1, 8)
    hit = cache.find(40)
    assert hit.num_tokens == 8
    assert hit.blocks[1] == (states[8],)
    states = cache.put(1, 16)
    assert cache.find(40).blocks[1] == (states[16],)


def test_a_state_without_snapshots_allows_no_reuse() -> None:
    cache = Cache(FULL, StateGroup(name="s", bytes_per_state=1))
    cache.put(0, 4, 8)
    assert cache.find(40) == PrefixHit(0, ((), ()))


@pytest.mark.parametrize("seed", range(200))
def test_against_brute_force(seed: int) -> None:
    r = random.Random(seed)
    groups: tuple[Group, ...] = (WIDE, FULL, WINDOW, STATE)
    cache = Cache(*groups)
    have = []
    for g, group in enumerate(groups):
        size = 4 if isinstance(group, StateGroup) else group.block_size
        ends = [end for end in range(size, 41, size) if r.random() < 0.85]
        have.append(cache.put(g, *ends))
    num_tokens = r.randint(1, 41)

    def valid(length: int) -> bool:
        wide, full, window, state = (set(h) for h in have)
        reads = range(max(0, length - WINDOW.window + 1), length)
        return (
            all(end in wide for end in range(8, length + 1, 8))
            and all(end in full for end in range(4, length + 1, 4))
            and all(p // 4 * 4 + 4 in window for p in reads)
            and length in state
        )

    longest = max((n for n in range(8, num_tokens, 8) if valid(n)), default=0)
    assert cache.find(num_tokens).num_tokens == longest
