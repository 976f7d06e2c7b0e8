"""Blocks that are offered to other engines: copied to host memory as they are ready, then held."""

from __future__ import annotations

from pegainfer.contract.peers import PeerBlock
from pegainfer.contract.step import KVSpec, PageGroup
from pegainfer.contract.tiers import DEVICE, Tier, Transfer
from pegainfer.kv.exports import HOST, Export
from pegainfer.kv.manager import KVManager
from pegainfer.kv.tiers import Tiers
from tests.null.kv.test_tiers import FULL, A, B, compute, hashes, leave, manager

WINDOW = PageGroup(name="window", block_size=4, bytes_per_block=1, window=5)


def advance(
    kv: KVManager, tiers: Tiers, export: Export, computed: int
) -> tuple[list[PeerBlock], list[Transfer]]:
    """What is ready, and the copies that begin."""
    ready = tiers.exports.advance(export, computed)
    transfers = tiers.saver.spill()
    kv.check_integrity()
    return ready, transfers


def land(kv: KVManager, tiers: Tiers, transfers: list[Transfer], *, landed: bool = True) -> None:
    for transfer in transfers:
        assert tiers.end(transfer.id, landed=landed)
    kv.check_integrity()


def test_blocks_are_offered_as_they_are_computed_and_copied() -> None:
    kv, tiers = manager(16)
    seq = compute(kv, A)
    export = tiers.exports.open(hashes(A), 13, kv.stride)
    ready, first = advance(kv, tiers, export, 5)
    assert ready == [] and [(t.source_pool, t.target_pool) for t in first] == [(DEVICE, HOST)]
    ready, rest = advance(kv, tiers, export, 12)
    assert ready == [] and len(rest) == 2
    land(kv, tiers, first)
    ready, _ = advance(kv, tiers, export, 12)
    assert ready == [PeerBlock(0, hashes(A)[0], first[0].target)]
    land(kv, tiers, rest)
    ready, more = advance(kv, tiers, export, 12)
    assert [block.key for block in ready] == hashes(A)[1:] and not more and not export.copying
    pool = tiers._levels[0].pools[HOST]
    assert [pool.refs(block.place) for block in ready] == [1, 1]
    kv.release(seq, after=0)
    tiers.exports.close(export)
    assert pool.num_cached == 3
    kv.check_integrity()


def test_only_what_a_prompt_of_this_length_can_reuse_is_offered() -> None:
    kv, tiers = manager(16)
    leave(kv, A)
    export = tiers.exports.open(hashes(A), 12, kv.stride)  # its last block has to be computed
    _, transfers = advance(kv, tiers, export, 12)
    assert [t.key for t in transfers] == hashes(A)[:2]


def test_held_blocks_are_not_evicted_and_what_finds_no_room_is_left_out() -> None:
    kv, tiers = manager(16, 3)
    leave(kv, A)
    first = tiers.exports.open(hashes(A), 13, kv.stride)
    while not first.held or first.copying:
        land(kv, tiers, advance(kv, tiers, first, 12)[1])
    leave(kv, B)
    second = tiers.exports.open(hashes(B), 13, kv.stride)
    assert advance(kv, tiers, second, 12) == ([], [])
    assert advance(kv, tiers, second, 12) == ([], []) and not second.copying
    tiers.exports.close(first)
    third = tiers.exports.open(hashes(B), 13, kv.stride)
    assert len(advance(kv, tiers, third, 12)[1]) == 3


def test_a_failed_copy_is_left_out() -> None:
    kv, tiers = manager(16)
    leave(kv, A)
    export = tiers.exports.open(hashes(A), 13, kv.stride)
    _, transfers = advance(kv, tiers, export, 12)
    land(kv, tiers, transfers[:1], landed=False)
    land(kv, tiers, transfers[1:])
    ready, _ = advance(kv, tiers, export, 12)
    assert [block.key for block in ready] == hashes(A)[1:] and not export.copying


def test_of_a_window_only_its_last_blocks_are_offered() -> None:
    tier = Tier(kind="host", num_blocks=(16, 16))
    kv = KVManager(KVSpec((FULL, WINDOW)), [16, 16], tiers=(tier,))
    assert kv.tiers is not None
    leave(kv, A)
    export = kv.tiers.exports.open(hashes(A), 13, kv.stride)
    _, transfers = advance(kv, kv.tiers, export, 12)
    # Token 12 reads positions 8 to 12, so of the window the blocks of 8 to 11.
    assert [(t.group, t.key) for t in transfers] == [(0, key) for key in hashes(A)] + [(1, hashes(A)[2])]


def test_a_peers_blocks_are_found_and_loaded_but_nothing_is_saved_there() -> None:
    below = (Tier(kind="host", num_blocks=(8,)), Tier(kind="peer", num_blocks=(8,)))
    kv = KVManager(KVSpec((FULL,)), [8], tiers=below)
    assert kv.tiers is not None
    offered = [PeerBlock(0, key, 5 + i) for i, key in enumerate(hashes(A))]
    kv.tiers.offer(offered)
    assert kv.tiers.saver.prefetch(hashes(A), 13) == []
    load = kv.tiers.load("owner", hashes(A), 13, kv.find(hashes(A), 13), [0])
    assert load is not None and [t.source_pool for t in load.transfers] == [2, 2, 2]
    kv.tiers.withdraw(offered)  # meanwhile
    kv.check_integrity()
    land(kv, kv.tiers, load.transfers)
    assert kv.find(hashes(A), 13).num_tokens == 12
    for first in (40, 60, 80):
        leave(kv, list(range(first, first + 12)))
        while transfers := kv.tiers.saver.spill():
            assert {t.target_pool for t in transfers} == {1}
            land(kv, kv.tiers, transfers)
    assert kv.tiers._levels[0].pools[2].num_cached == 0
