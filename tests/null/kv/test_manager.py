"""Tables over all groups: growth, hits, forks, windows, snapshots, and a random comparison of contents."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegainfer.contract.errors import ConfigError, InvariantError
from pegainfer.contract.request import hash_blocks, pack_tokens, root_hash
from pegainfer.contract.step import NO_BLOCK, BlockCopy, KVSpec, PageGroup, StateGroup
from pegainfer.kv.manager import KVManager
from pegainfer.kv.prefix import PrefixHit
from pegainfer.kv.tables import UNBOUNDED, SequenceBlocks

FULL = PageGroup(name="full", block_size=4, bytes_per_block=1)
WINDOW = PageGroup(name="window", block_size=4, bytes_per_block=1, window=6)
STATE = StateGroup(name="state", bytes_per_state=1, snapshot_every=8)
ROOT = root_hash(None, "")


def manager(*groups: PageGroup | StateGroup, blocks: int = 16, **options: Any) -> KVManager:
    groups = groups or (FULL,)
    return KVManager(KVSpec(groups), [blocks] * len(groups), **options)


def begin(kv: KVManager, tokens: list[int], positions: int, step: int = 1, salt: str = "") -> SequenceBlocks:
    root = root_hash(None, salt)
    hashes = hash_blocks(pack_tokens(tokens), kv.unit, parent=root)
    hit = kv.find(hashes, len(tokens))
    return kv.begin(root, hashes, hit, positions, step=step)[0]


def publish(kv: KVManager, seq: SequenceBlocks, tokens: list[int], computed: int) -> None:
    kv.publish(seq, array("i", tokens), computed)


def test_growth_appends_to_every_page_group() -> None:
    kv = manager(FULL, PageGroup(name="wide", block_size=8, bytes_per_block=1))
    seq = begin(kv, [1, 2, 3], 3)
    assert (seq.tables, seq.capacity) == ([[0], [0]], 4)
    assert kv.grow(seq, 9) == [(0, (1, 2)), (1, (1,))]
    assert seq.capacity == 12
    assert kv.grow(seq, 12) == []


def test_room_is_what_the_scarcest_group_allows() -> None:
    kv = KVManager(KVSpec((FULL, PageGroup(name="wide", block_size=8, bytes_per_block=1))), [10, 2])
    seq = begin(kv, [1], 1)
    assert kv.room(seq) == 16
    other = begin(kv, [2], 1)
    assert kv.room(seq) == 8
    kv.release(other, after=3)
    assert (kv.room(seq), kv.room(seq, with_deferred=True)) == (8, 16)


def test_a_state_only_model_has_no_bound_on_positions() -> None:
    kv = manager(STATE)
    seq = begin(kv, [1], 1)
    assert seq.capacity == kv.room(seq) == UNBOUNDED
    assert kv.unit == 8


@pytest.mark.parametrize(
    ("groups", "blocks", "reach"),
    [
        ((FULL,), 5, 20),
        ((FULL, STATE), 5, 20),
        ((FULL, STATE), 0, 0),
        # The window of 6 spans at most 3 blocks of 4: with 3 it can slide for ever, with 2 it cannot.
        ((WINDOW,), 3, UNBOUNDED),
        ((WINDOW,), 2, 8),
    ],
)
def test_reach_of_one_sequence_alone(groups: tuple[Any, ...], blocks: int, reach: int) -> None:
    assert KVManager(KVSpec(groups), [blocks] * len(groups)).reach_alone(1) == reach


@pytest.mark.parametrize(
    "groups",
    [
        (FULL, PageGroup(name="odd", block_size=6, bytes_per_block=1)),
        (FULL, StateGroup(name="s", bytes_per_state=1, snapshot_every=6)),
        (
            FULL,
            PageGroup(name="wide", block_size=8, bytes_per_block=1),
            StateGroup(name="s", bytes_per_state=1, snapshot_every=12),
        ),
        (),
    ],
)
def test_block_sizes_that_do_not_fit_together_are_refused(groups: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError):
        KVManager(KVSpec(groups), [4] * len(groups))


def test_published_blocks_are_shared_by_reference() -> None:
    kv = manager()
    tokens = list(range(10))
    first = begin(kv, tokens, 10)
    publish(kv, first, tokens, 10)
    second = begin(kv, tokens, 10)
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2]
    assert kv.pools[0].refs(first.tables[0][0]) == 2
    kv.check_integrity()


def test_nothing_is_found_before_it_is_published() -> None:
    kv = manager()
    tokens = list(range(10))
    begin(kv, tokens, 10)
    assert kv.find(hash_blocks(pack_tokens(tokens), 4, parent=ROOT), 10).num_tokens == 0


@pytest.mark.parametrize(("salt", "hit"), [("a", 8), ("b", 0), ("", 0)])
def test_salts_keep_prefixes_apart(salt: str, hit: int) -> None:
    kv = manager()
    tokens = list(range(10))
    publish(kv, begin(kv, tokens, 10, salt="a"), tokens, 10)
    hashes = hash_blocks(pack_tokens(tokens), 4, parent=root_hash(None, salt))
    assert kv.find(hashes, 10).num_tokens == hit


def test_with_the_cache_off_nothing_is_found_or_published() -> None:
    kv = manager(prefix_cache=False)
    tokens = list(range(10))
    seq = begin(kv, tokens, 10)
    publish(kv, seq, tokens, 10)
    kv.release(seq, after=0)
    assert kv.pools[0].num_cached == 0
    assert kv.find(hash_blocks(pack_tokens(tokens), 4, parent=ROOT), 10).num_tokens == 0


def test_generated_blocks_are_hashed_as_they_fill() -> None:
    kv = manager()
    tokens = list(range(20))
    seq = begin(kv, tokens[:6], 20)
    publish(kv, seq, tokens, 19)
    assert seq.hashes == hash_blocks(pack_tokens(tokens[:16]), 4, parent=ROOT)
    assert kv.find(seq.hashes, 20).num_tokens == 16


def test_a_released_head_is_evicted_last() -> None:
    kv = manager(blocks=4)
    tokens = list(range(16))
    seq = begin(kv, tokens, 16)
    publish(kv, seq, tokens, 16)
    kv.release(seq, after=0)
    begin(kv, [99] * 8, 8)  # evicts two blocks
    assert kv.find(seq.hashes, 17).num_tokens == 8


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    kv = manager(FULL, STATE)
    tokens = list(range(11))
    parent = begin(kv, tokens, 10)
    forked = kv.fork(parent, 10, 11, step=7)
    assert forked is not None
    child, copies = forked
    assert child.tables[0][:2] == parent.tables[0][:2]
    assert copies == [
        BlockCopy(0, parent.tables[0][2], child.tables[0][2]),
        BlockCopy(1, parent.tables[1][0], child.tables[1][0]),
    ]
    # The sources may not be reused before plan 7 is committed, even if the parent goes.
    kv.release(parent, after=0)
    assert kv.pools[1].available == 14
    kv.retire(7)
    assert kv.pools[1].available == 15
    kv.check_integrity()


def test_a_fork_at_a_block_boundary_copies_no_page() -> None:
    kv = manager()
    parent = begin(kv, list(range(9)), 8)
    forked = kv.fork(parent, 8, 9, step=1)
    assert forked is not None
    child, copies = forked
    assert copies == []
    assert len(child.tables[0]) == 3


def test_a_fork_without_room_changes_nothing() -> None:
    kv = manager(blocks=3)
    parent = begin(kv, list(range(11)), 10)
    assert kv.fork(parent, 10, 11, step=1) is None
    kv.check_integrity()
    assert kv.pools[0].refs(0) == 1


def test_blocks_before_the_window_are_released() -> None:
    kv = manager(FULL, WINDOW)
    seq = begin(kv, list(range(20)), 20)
    kv.trim(seq, 12, after=3)
    # Position 12 reads 7 to 12: blocks 0 of the window group is out, block 1 is not.
    assert seq.tables[1][0] == NO_BLOCK
    assert NO_BLOCK not in seq.tables[0]
    assert kv.pools[1].available == 11
    kv.retire(3)
    assert kv.pools[1].available == 12
    kv.check_integrity()


def test_a_hit_in_a_window_group_holds_only_the_window() -> None:
    kv = manager(FULL, WINDOW)
    tokens = list(range(20))
    first = begin(kv, tokens, 20)
    publish(kv, first, tokens, 20)
    kv.release(first, after=0)
    second = begin(kv, tokens, 20)
    assert second.tables[1][:2] == [NO_BLOCK, NO_BLOCK]
    assert second.tables[1][2:4] == first.tables[1][2:4]
    kv.release(second, after=0)
    kv.check_integrity()


def test_what_fits_counts_the_hit_once() -> None:
    kv = manager(blocks=4)
    tokens = list(range(16))
    seq = begin(kv, tokens, 12)
    publish(kv, seq, tokens, 12)
    kv.release(seq, after=0)
    hit = kv.find(seq.hashes, 16)
    assert hit.num_tokens == 12
    # Three blocks are cached and part of the hit, one is free.
    assert kv.fits(hit, 16, 4, [0])
    assert not kv.fits(hit, 16, 4, [1])
    assert not kv.fits(hit, 17, 4, [0])
    assert (kv.reach(hit, [0]), kv.reach(hit, [1])) == (16, 12)


def test_an_unbalanced_release_is_noticed() -> None:
    kv = manager()
    seq = begin(kv, list(range(8)), 8)
    kv.pools[0].release(seq.tables[0][0], after=0)
    with pytest.raises(InvariantError):
        kv.check_integrity()


class ManagerMachine(RuleBasedStateMachine):
    """Sequences over three kinds of group, and beside them what each block should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(KVSpec((FULL, WINDOW, STATE)), [12, 10, 5])
        self.seqs: list[tuple[SequenceBlocks, list[int], int]] = []  # tables, tokens, computed
        self.pages: list[dict[int, tuple[int, ...]]] = [{}, {}, {}]  # block -> the prefix that it ends
        self.step = 1

    def write(self, seq: SequenceBlocks, tokens: list[int], start: int, stop: int) -> None:
        for g in (0, 1):
            for i in range(start // 4, -(-stop // 4)):
                block = seq.tables[g][i]
                if block != NO_BLOCK:
                    others = [s for s, _, _ in self.seqs if s is not seq and block in s.tables[g]]
                    assert not others, "a shared block is written"
                    self.pages[g][block] = tuple(tokens[: min(stop, i * 4 + 4)])
        self.pages[2][seq.tables[2][0]] = tuple(tokens[:stop])

    def copy(self, copies: list[BlockCopy]) -> None:
        for c in copies:
            self.pages[c.group][c.dst] = self.pages[c.group][c.src]

    @rule(
        data=st.data(), length=st.integers(2, 30), salt=st.sampled_from(["", "s"]), chunk=st.integers(1, 20)
    )
    def begin(self, data: st.DataObject, length: int, salt: str, chunk: int) -> None:
        shared = data.draw(st.integers(0, length))
        tokens = [*range(shared), *data.draw(st.lists(st.integers(50, 52), min_size=30, max_size=30))][
            :length
        ]
        root = root_hash(None, salt)
        if salt:
            tokens = [t + 100 for t in tokens]  # so that contents tell the salts apart
        hashes = hash_blocks(pack_tokens(tokens), 4, parent=root)
        hit = self.kv.find(hashes, length)
        self.check_hit(hit, tokens)
        stop = min(length, hit.num_tokens + chunk)
        if not self.kv.fits(hit, stop, chunk, [0, 0, 0]):
            return
        seq, copies = self.kv.begin(root, hashes, hit, stop, step=self.step)
        self.copy(copies)
        self.write(seq, tokens, hit.num_tokens, stop)
        self.seqs.append((seq, tokens, stop))

    def check_hit(self, hit: PrefixHit, tokens: list[int]) -> None:
        for g in (0, 1):
            for i, block in enumerate(hit.blocks[g]):
                if block != NO_BLOCK:
                    assert self.pages[g][block] == tuple(tokens[: i * 4 + 4])
        for state in hit.blocks[2]:
            assert self.pages[2][state] == tuple(tokens[: hit.num_tokens])

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), count=st.integers(1, 9), token=st.integers(50, 52))
    def advance(self, data: st.DataObject, count: int, token: int) -> None:
        """Computes what is known, then one token more at a time; publishes and keeps a state on the way."""
        i = data.draw(st.integers(0, len(self.seqs) - 1))
        seq, tokens, computed = self.seqs[i]
        tokens = tokens + [token] * max(0, computed + count - len(tokens))
        stop = min(computed + count, self.kv.room(seq))
        if stop <= computed:
            return
        self.kv.grow(seq, stop)
        self.write(seq, tokens, computed, stop)
        self.kv.extend_hashes(seq, array("i", tokens), stop // 4)
        states = self.kv.states
        assert states is not None
        if stop - computed == 1:
            kept = states.of_decode(seq, 0, computed, stop, self.step)
        else:
            kept = states.of_prompt(seq, 0, computed, stop, len(tokens), self.step)
        for snapshot in kept:
            self.pages[snapshot.group][snapshot.state] = tuple(tokens[: snapshot.position])
        self.kv.publish(seq, array("i", tokens), stop)
        self.kv.trim(seq, stop, after=self.step)
        self.seqs[i] = (seq, tokens, stop)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq, tokens, computed = data.draw(st.sampled_from(self.seqs))
        forked = self.kv.fork(seq, computed, computed + 1, step=self.step)
        if forked is not None:
            self.copy(forked[1])
            self.seqs.append((forked[0], tokens[:computed], computed))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), delay=st.integers(-1, 1))
    def release(self, data: st.DataObject, delay: int) -> None:
        seq, _, _ = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        self.kv.release(seq, after=self.step + delay)

    @rule()
    def retire(self) -> None:
        self.kv.retire(self.step)
        self.step += 1

    @invariant()
    def sound(self) -> None:
        self.kv.check_integrity()
        for seq, tokens, computed in self.seqs:
            low = max(0, computed - WINDOW.window + 1)
            for g, first in ((0, 0), (1, low // 4)):
                for i in range(first, -(-computed // 4)):
                    held = self.pages[g][seq.tables[g][i]]
                    assert held[: min(computed, i * 4 + 4)] == tuple(tokens[: min(computed, i * 4 + 4)])

    def teardown(self) -> None:
        for seq, _, _ in self.seqs:
            self.kv.release(seq, after=self.step)
        self.retire()
        self.retire()
        for pool in self.kv.pools:
            assert pool.available == pool.num_blocks


ManagerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
TestManagerMachine = ManagerMachine.TestCase
