"""Snapshots of states: where they are taken, when a hit finds them, and what becomes of them otherwise."""

from __future__ import annotations

from array import array

from pegainfer.contract.request import hash_blocks, pack_tokens, root_hash
from pegainfer.contract.step import BlockCopy, KVSpec, PageGroup, StateGroup, StateSnapshot
from pegainfer.kv.manager import KVManager
from pegainfer.kv.states import StateKeeper
from pegainfer.kv.tables import SequenceBlocks

FULL = PageGroup(name="full", block_size=4, bytes_per_block=1)
STATE = StateGroup(name="state", bytes_per_state=1, snapshot_every=8)
ROOT = root_hash(None, "")
TOKENS = list(range(30))


def manager(states: int = 16) -> tuple[KVManager, StateKeeper]:
    kv = KVManager(KVSpec((FULL, STATE)), [16, states])
    assert kv.states is not None
    return kv, kv.states


def begin(kv: KVManager, positions: int) -> SequenceBlocks:
    hashes = hash_blocks(pack_tokens(TOKENS[:positions]), 4, parent=ROOT)
    return kv.begin(ROOT, hashes, kv.find(hashes, positions), positions, step=1)[0]


def publish(kv: KVManager, seq: SequenceBlocks, computed: int) -> None:
    kv.publish(seq, array("i", TOKENS), computed)


def positions(snapshots: list[StateSnapshot]) -> list[int]:
    return [snapshot.position for snapshot in snapshots]


def test_a_snapshot_is_found_once_its_row_is_committed() -> None:
    kv, states = manager()
    seq = begin(kv, 20)
    (kept, last) = states.of_prompt(seq, 3, 0, 19, 19, step=1)
    assert (kept.slot, kept.group, kept.position, last.position) == (3, 1, 8, 16)
    assert kv.find(seq.hashes, 20).num_tokens == 0
    publish(kv, seq, 15)
    hit = kv.find(seq.hashes, 20)
    assert (hit.num_tokens, hit.blocks[1]) == (8, (kept.state,))
    publish(kv, seq, 19)
    hit = kv.find(seq.hashes, 20)
    assert (hit.num_tokens, hit.blocks[1]) == (16, (last.state,))
    other, copies = kv.begin(ROOT, seq.hashes, hit, 20, step=2)
    assert copies == [BlockCopy(1, last.state, other.tables[1][0])]
    assert states.of_prompt(seq, 3, 0, 19, 19, step=2) == []  # all are kept already
    kv.check_integrity()


def test_a_boundary_between_the_equal_steps_is_kept_too() -> None:
    kv, states = manager()
    assert positions(states.of_prompt(begin(kv, 22), 0, 0, 22, 22, step=1)) == [8, 16, 20]


def test_a_sequence_that_ends_before_its_row_is_committed_leaves_no_snapshot() -> None:
    kv, states = manager()
    seq = begin(kv, 20)
    states.of_prompt(seq, 3, 0, 19, 19, step=1)
    kv.release(seq, after=1)
    kv.check_integrity()
    kv.retire(1)
    assert kv.pools[1].num_cached == 0
    assert kv.pools[1].available == 16


def test_a_preempted_sequences_row_in_flight_leaves_its_snapshot() -> None:
    kv, states = manager()
    seq = begin(kv, 20)
    states.of_prompt(seq, 3, 0, 19, 19, step=1)
    kv.release(seq, after=1)
    publish(kv, seq, 19)
    kv.retire(1)
    assert kv.find(seq.hashes, 20).num_tokens == 16
    kv.check_integrity()


def test_states_of_an_empty_pool_are_not_kept() -> None:
    kv, states = manager(states=1)
    seq = begin(kv, 20)
    assert states.of_prompt(seq, 3, 0, 19, 19, step=1) == []
    assert states.of_decode(seq, 3, 19, 20, step=2) == []


def test_a_boundary_that_rows_with_drafts_may_miss_is_named_until_one_passes_it() -> None:
    kv, states = manager()
    seq = begin(kv, 24)
    (first,) = states.of_decode(seq, 0, 10, 14, step=1)  # at most position 13 is computed, 12 may be missed
    assert states.of_decode(seq, 0, 14, 15, step=2) == [first]
    publish(kv, seq, 11)  # both were rejected but for one token
    assert states.of_decode(seq, 0, 11, 14, step=3) == [first]
    publish(kv, seq, 13)
    assert seq.pending == []
    kv.retire(3)
    assert kv.pools[1].lookup(seq.hashes[2]) == first.state
    assert states.of_decode(seq, 0, 13, 15, step=4) == []
    kv.check_integrity()


def test_a_newer_snapshot_of_an_answer_replaces_the_older_one() -> None:
    kv, states = manager()
    seq = begin(kv, 24)
    for step, position in enumerate((8, 12, 16), 1):
        states.of_decode(seq, 0, position - 1, position, step)
        publish(kv, seq, position)
        kv.retire(step)
        assert kv.pools[1].num_cached == 1
        assert kv.find(seq.hashes, 24).num_tokens == position
    kv.check_integrity()


def test_a_replaced_snapshot_that_another_sequence_copies_stays() -> None:
    kv, states = manager()
    seq = begin(kv, 24)
    states.of_decode(seq, 0, 7, 8, step=1)
    publish(kv, seq, 8)
    kv.retire(1)
    other, copies = kv.begin(ROOT, seq.hashes, kv.find(seq.hashes, 24), 12, step=2)
    states.of_decode(seq, 0, 11, 12, step=2)
    publish(kv, seq, 12)
    assert kv.pools[1].refs(copies[0].src) == 1  # held until plan 2 has copied it
    kv.retire(2)
    kv.release(other, after=0)
    kv.check_integrity()
