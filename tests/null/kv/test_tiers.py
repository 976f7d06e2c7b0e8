"""Blocks that move between the device and the tiers below it: who holds them, and who finds them when."""

from __future__ import annotations

from array import array

import pytest

from pegainfer.contract.request import hash_blocks, pack_tokens, root_hash
from pegainfer.contract.step import KVSpec, PageGroup, StateGroup
from pegainfer.contract.tiers import DEVICE, Tier, Transfer
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.levels import Levels
from pegainfer.kv.manager import KVManager
from pegainfer.kv.tables import SequenceBlocks
from pegainfer.kv.tiers import Tiers

FULL = PageGroup(name="full", block_size=4, bytes_per_block=1)
STATE = StateGroup(name="state", bytes_per_state=1, snapshot_every=4)
ROOT = root_hash(None, "")


def manager(device: int = 4, *tiers: int) -> tuple[KVManager, Tiers]:
    """One page group; a tier of so many blocks each."""
    below = tuple(Tier(kind="host", num_blocks=(n,)) for n in tiers or (16,))
    kv = KVManager(KVSpec((FULL,)), [device], tiers=below)
    assert kv.tiers is not None
    return kv, kv.tiers


def hashes(tokens: list[int]) -> list[bytes]:
    return hash_blocks(pack_tokens(tokens), 4, parent=ROOT)


def compute(kv: KVManager, tokens: list[int]) -> SequenceBlocks:
    """A sequence that computes all its tokens and publishes them."""
    keys = hashes(tokens)
    seq, _ = kv.begin(ROOT, keys, kv.find(keys, len(tokens)), len(tokens), step=1)
    kv.publish(seq, array("i", tokens), len(tokens))
    return seq


def leave(kv: KVManager, tokens: list[int]) -> None:
    """A sequence that computed `tokens` has ended."""
    kv.release(compute(kv, tokens), after=0)


def land(tiers: Tiers, transfers: list[Transfer], *, landed: bool = True) -> None:
    for transfer in transfers:
        assert tiers.end(transfer.id, landed=landed)


A, B = list(range(12)), list(range(20, 32))


def test_blocks_are_spilled_in_the_order_of_their_release_once_the_pool_is_short() -> None:
    kv, tiers = manager(16)
    leave(kv, A)
    assert tiers.saver.spill() == []  # 13 of 16 blocks are free
    for first in (40, 60, 80):
        leave(kv, list(range(first, first + 12)))
    first, second, third, *others = tiers.saver.spill()
    assert len(others) == 1  # at most a quarter of the pool is on its way
    tail = [kv.pools[0].lookup(key) for key in reversed(hashes(A))]
    assert [t.source for t in (first, second, third)] == tail
    assert (first.source_pool, first.target_pool) == (DEVICE, 1)
    assert tiers.saver.spill() == []
    kv.check_integrity()
    land(tiers, [first])
    assert len(tiers.saver.spill()) == 1
    kv.check_integrity()


def test_a_block_on_its_way_is_held_and_the_first_to_be_evicted_afterwards() -> None:
    kv, tiers = manager(4)
    leave(kv, A)
    (transfer,) = tiers.saver.spill()
    pool = kv.pools[0]
    assert (pool.refs(transfer.source), pool.available) == (1, 3)
    assert pool.lookup(hashes(A)[2]) == transfer.source  # a request may find it meanwhile
    land(tiers, [transfer])
    assert pool.available == 4
    pool.allocate()  # the free one
    assert pool.allocate() == transfer.source
    assert pool.lookup(hashes(A)[2]) is None


def test_an_evicted_prefix_is_loaded_and_found_once_the_last_block_has_landed() -> None:
    kv, tiers = manager(4)
    leave(kv, A)
    while spilled := tiers.saver.spill():
        land(tiers, spilled)
    leave(kv, B)
    keys = hashes(A)
    hit = kv.find(keys, 13)
    load = tiers.load("owner", keys, 13, hit, [0])
    assert load is not None
    assert [(t.source_pool, t.target_pool) for t in load.transfers] == [(1, DEVICE)] * 2
    kv.check_integrity()
    land(tiers, load.transfers[:1])
    assert tiers.take_loaded() == []
    kv.check_integrity()
    land(tiers, load.transfers[1:])
    assert [done.owners for done in tiers.take_loaded()] == [["owner"]]
    assert kv.find(keys, 13).num_tokens == 12
    kv.check_integrity()


def test_only_what_was_spilled_is_loaded_and_what_is_there_is_held() -> None:
    kv, tiers = manager(6)
    leave(kv, A)
    pool = kv.pools[0]
    taken = [pool.allocate() for _ in range(3)]
    spilled = tiers.saver.spill()
    land(tiers, spilled)
    taken += [pool.allocate()]  # evicts the block that was spilled, the last of A
    pool.release(*taken, after=0)
    keys = hashes(A)
    load = tiers.load("owner", keys, 13, kv.find(keys, 13), [0])
    assert load is not None and [t.source for t in load.transfers] == [spilled[0].target]
    assert [pool.refs(block) for block in (pool.lookup_run(keys[:2]))] == [1, 1]
    land(tiers, load.transfers)
    assert kv.find(keys, 13).num_tokens == 12
    assert pool.num_cached == 3
    kv.check_integrity()


@pytest.mark.parametrize("spare", [0, 1])
def test_a_load_leaves_the_spare_blocks_alone(spare: int) -> None:
    kv, tiers = manager(3)
    leave(kv, A)
    while spilled := tiers.saver.spill():
        land(tiers, spilled)
    leave(kv, B)
    keys = hashes(A)
    load = tiers.load("owner", keys, 13, kv.find(keys, 13), [spare])
    assert (load is None) == (spare > 0)
    kv.check_integrity()


def test_a_failed_load_forgets_its_source_and_publishes_nothing() -> None:
    kv, tiers = manager(4)
    leave(kv, A)
    while spilled := tiers.saver.spill():
        land(tiers, spilled)
    leave(kv, B)
    keys = hashes(A)
    load = tiers.load("owner", keys, 13, kv.find(keys, 13), [0])
    assert load is not None
    land(tiers, load.transfers[:1])
    land(tiers, load.transfers[1:], landed=False)
    assert len(tiers.take_loaded()) == 1
    assert kv.find(keys, 13).num_tokens == 4
    assert tiers.load("owner", keys, 13, kv.find(keys, 13), [0]) is None
    kv.check_integrity()


def test_a_failed_spill_leaves_the_block_where_it_is() -> None:
    kv, tiers = manager(4)
    leave(kv, A)
    (transfer,) = tiers.saver.spill()
    land(tiers, [transfer], landed=False)
    assert kv.find(hashes(A), 13).num_tokens == 12
    assert tiers._levels[0].pools[1].num_cached == 0
    kv.check_integrity()


def test_a_tier_spills_to_the_one_below_and_one_without_the_group_is_passed_over() -> None:
    kv, tiers = manager(4, 0, 2, 8)
    leave(kv, A)
    moved: list[tuple[int, int]] = []
    for _ in range(8):
        transfers = tiers.saver.spill()
        moved += [(t.source_pool, t.target_pool) for t in transfers]
        land(tiers, transfers)
        kv.check_integrity()
    assert moved.count((0, 2)) == 3
    assert moved.count((2, 3)) >= 1
    assert all(1 not in pools for pools in moved)


def test_a_reset_clears_every_tier_and_what_is_on_its_way() -> None:
    kv, tiers = manager(4)
    leave(kv, A)
    while spilled := tiers.saver.spill():
        land(tiers, spilled)
    leave(kv, B)
    keys = hashes(A)
    load = tiers.load("owner", keys, 13, kv.find(keys, 13), [0])
    spilled = tiers.saver.spill()
    assert load is not None
    kv.reset_prefix_cache()
    kv.check_integrity()
    land(tiers, load.transfers + spilled)
    kv.check_integrity()
    for tokens in (A, B):
        assert kv.find(hashes(tokens), 13).num_tokens == 0
        assert tiers.load("owner", hashes(tokens), 13, kv.find(hashes(tokens), 13), [0]) is None
    assert [pool.num_cached for pool in tiers._levels[0].pools] == [0, 0]


def test_states_are_loaded_with_the_pages_before_them() -> None:
    tier = Tier(kind="host", num_blocks=(16, 16))
    kv = KVManager(KVSpec((FULL, STATE)), [8, 4], tiers=(tier,))
    assert kv.tiers is not None and kv.states is not None
    keys = hashes(A)
    seq, _ = kv.begin(ROOT, keys, kv.find(keys, 12), 12, step=1)
    kv.states.of_decode(seq, 0, 7, 8, step=1)
    kv.publish(seq, array("i", A), 12)
    kv.retire(1)
    kv.release(seq, after=0)
    for pool in kv.pools:  # so that both are short of free blocks
        pool.release(*[pool.allocate() for _ in range(pool.num_free)], after=2)
    while spilled := kv.tiers.saver.spill():
        land(kv.tiers, spilled)
    kv.retire(2)
    for pool in kv.pools:
        pool.forget_all()
    load = kv.tiers.load("owner", keys, 12, kv.find(keys, 12), [0, 0])
    assert load is not None
    assert sorted(t.group for t in load.transfers) == [0, 0, 1]
    land(kv.tiers, load.transfers)
    assert kv.find(keys, 12).num_tokens == 8
    kv.check_integrity()


def test_places_name_a_pool_and_a_block() -> None:
    levels = Levels([BlockPool("device", 3), BlockPool("host", 0), BlockPool("disk", 5)])
    assert [levels.locate(place) for place in (0, 2, 3, 7)] == [(0, 0), (0, 2), (2, 0), (2, 4)]
    block = levels.pools[2].allocate()
    levels.pools[2].publish(block, b"key")
    assert levels.lookup(b"key") == 3 + block
    assert levels.lookup_run([b"key", b"none", b"key"]) == [3 + block]


def test_a_second_sequence_joins_the_load_of_the_first() -> None:
    kv, tiers = manager(8)
    leave(kv, A)
    tiers.saver.save(0, kv.pools[0].lookup_run(hashes(A)))
    while spilled := tiers.saver.spill():
        land(tiers, spilled)
    kv.pools[0].forget_all()
    keys = hashes(A)
    load = tiers.load("first", keys, 9, kv.find(keys, 9), [0])
    assert load is not None and len(load.transfers) == 2
    assert tiers.load("second", keys, 13, kv.find(keys, 13), [0]) is load
    land(tiers, load.transfers)
    assert [done.owners for done in tiers.take_loaded()] == [["first", "second"]]
    rest = tiers.load("second", keys, 13, kv.find(keys, 13), [0])
    assert rest is not None and len(rest.transfers) == 1
    kv.check_integrity()


def test_a_prefix_in_use_is_saved_through_all_tiers_once() -> None:
    kv, tiers = manager(8, 8, 8)
    seq = compute(kv, A)
    blocks = kv.pools[0].lookup_run(hashes(A))
    moved: list[tuple[int, int]] = []
    for _ in range(3):
        tiers.saver.save(0, blocks)
        transfers = tiers.saver.spill()
        tiers.saver.save(0, blocks)  # it is on its way
        transfers += tiers.saver.spill()
        moved += [(t.source_pool, t.target_pool) for t in transfers]
        land(tiers, transfers)
        kv.check_integrity()
    while transfers := tiers.saver.spill():
        moved += [(t.source_pool, t.target_pool) for t in transfers]
        land(tiers, transfers)
    assert sorted(moved) == [(DEVICE, 1)] * 3 + [(1, 2)] * 3
    kv.release(seq, after=0)
    kv.check_integrity()


def test_a_queued_prefix_comes_from_disk_to_host_once() -> None:
    below = (Tier(kind="host", num_blocks=(8,)), Tier(kind="disk", num_blocks=(8,), stored=(stored(A),)))
    kv = KVManager(KVSpec((FULL,)), [8], tiers=below)
    assert kv.tiers is not None
    keys = hashes(A)
    first = kv.tiers.saver.prefetch(keys, 13)
    assert [(t.source_pool, t.source, t.target_pool) for t in first] == [(2, 0, 1), (2, 1, 1)]
    assert kv.tiers.saver.prefetch(keys, 9) == []
    land(kv.tiers, first[:1])
    land(kv.tiers, first[1:], landed=False)
    assert [pool.num_cached for pool in kv.tiers._levels[0].pools] == [0, 1, 2]
    load = kv.tiers.load("owner", keys, 13, kv.find(keys, 13), [0])
    assert load is not None and [t.source_pool for t in load.transfers] == [1]  # the block after it is lost
    kv.check_integrity()


def stored(tokens: list[int]) -> tuple[tuple[int, bytes], ...]:
    return tuple(enumerate(hashes(tokens)))


def test_a_load_that_is_not_worth_it_changes_nothing() -> None:
    kv = KVManager(KVSpec((FULL,)), [8], tiers=(Tier(kind="disk", num_blocks=(8,), stored=(stored(A),)),))
    assert kv.tiers is not None
    keys, asked = hashes(A), []

    def worth(start: int, end: int, nbytes: dict[int, int]) -> bool:
        asked.append((start, end, dict(nbytes)))
        return False

    assert kv.tiers.load("owner", keys, 13, kv.find(keys, 13), [0], worth) is None
    assert asked == [(0, 12, {1: 3})]
    assert kv.tiers.in_flight == 0 and kv.tiers.stats()[0].hit_tokens == 0
    kv.check_integrity()
