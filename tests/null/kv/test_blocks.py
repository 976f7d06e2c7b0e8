"""One group's block pool: states of a block, deferred frees, the key index, and a random comparison."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pegainfer.contract.errors import InvariantError
from pegainfer.kv.blocks import BlockPool


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def test_blocks_come_in_order_and_the_last_freed_is_reused_first() -> None:
    pool = BlockPool("g", 4)
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    pool.release(1, after=0)
    assert pool.available == 2
    assert pool.allocate() == 1


def test_an_exhausted_pool_raises() -> None:
    pool = BlockPool("g", 1)
    pool.allocate()
    with pytest.raises(InvariantError, match="exhausted"):
        pool.allocate()


def test_a_block_is_free_only_after_the_plan_that_uses_it() -> None:
    pool = BlockPool("g", 1)
    block = pool.allocate()
    pool.release(block, after=5)
    assert (pool.available, pool.num_deferred) == (0, 1)
    pool.retire(4)
    assert pool.available == 0
    pool.retire(5)
    assert (pool.available, pool.num_deferred) == (1, 0)


def test_a_release_after_a_retired_plan_is_immediate() -> None:
    pool = BlockPool("g", 1)
    pool.retire(3)
    pool.release(pool.allocate(), after=3)
    assert pool.available == 1


def test_the_cached_block_released_longest_ago_is_evicted() -> None:
    pool = BlockPool("g", 2)
    for i in range(2):
        pool.publish(pool.allocate(), key(i))
    pool.release(1, after=0)
    pool.release(0, after=0)
    assert pool.allocate() == 1
    assert pool.lookup(key(1)) is None
    assert pool.lookup(key(0)) == 0


def test_a_cached_block_is_revived_with_its_key() -> None:
    pool = BlockPool("g", 2)
    pool.publish(pool.allocate(), key(7))
    pool.release(0, after=0)
    assert pool.num_cached == 1
    pool.acquire(0)
    assert (pool.num_cached, pool.refs(0), pool.lookup(key(7))) == (0, 1, 0)


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool("g", 3)
    pool.publish(pool.allocate(), key(0))
    pool.release(0, after=0)
    assert [pool.allocate(), pool.allocate()] == [1, 2]
    assert pool.lookup(key(0)) == 0


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool("g", 2)
    a, b = pool.allocate(), pool.allocate()
    pool.publish(a, key(0))
    pool.publish(b, key(0))
    assert pool.lookup(key(0)) == a
    pool.release(b, after=0)
    assert pool.num_cached == 0  # the copy has no key, so nothing is remembered of it


@pytest.mark.parametrize(
    "fault",
    [
        lambda pool: pool.release(1, after=0),
        lambda pool: pool.acquire(1),
        lambda pool: pool.publish(1, key(0)),
        lambda pool: (pool.publish(0, key(0)), pool.publish(0, key(1))),
    ],
    ids=["double free", "sharing a free block", "publishing a free block", "two keys of a block"],
)
def test_misuse_raises(fault: object) -> None:
    pool = BlockPool("g", 2)
    pool.allocate()
    with pytest.raises(InvariantError):
        fault(pool)  # type: ignore[operator]


@pytest.mark.parametrize("attribute", ["_free", "_cached", "_index", "_deferred"])
def test_check_integrity_notices_a_lost_entry(attribute: str) -> None:
    pool = BlockPool("g", 4)
    for i in range(3):
        pool.publish(pool.allocate(), key(i))
    pool.release(0, after=0)
    pool.release(1, after=9)
    pool.check_integrity()
    getattr(pool, attribute).clear()
    with pytest.raises(InvariantError):
        pool.check_integrity()


def test_check_integrity_compares_with_the_holders() -> None:
    pool = BlockPool("g", 2)
    pool.allocate()
    pool.check_integrity(Counter({0: 1}))
    with pytest.raises(InvariantError, match="its holders account for 2"):
        pool.check_integrity(Counter({0: 2}))


class PoolMachine(RuleBasedStateMachine):
    """The pool beside a model: references in a list, the cache as an ordered list of keys."""

    SIZE = 5

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool("g", self.SIZE)
        self.held: list[int] = []  # one entry a reference
        self.waiting: list[tuple[int, int]] = []  # (step, block) of deferred releases
        self.keys: dict[int, bytes] = {}
        self.lru: list[int] = []
        self.step = 0

    @rule()
    def allocate(self) -> None:
        if self.pool.available == 0:
            return
        free = set(range(self.SIZE)) - set(self.refs()) - set(self.lru)
        block = self.pool.allocate()
        if free:
            assert block in free
        else:
            assert block == self.lru.pop(0)
            del self.keys[block]
        self.held.append(block)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys) or [-1]))
        if block < 0:
            return
        assert self.pool.lookup(self.keys[block]) == block
        self.pool.acquire(block)
        if block in self.lru:
            self.lru.remove(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=st.integers(0, 3))
    def release(self, data: st.DataObject, delay: int) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(block, after=self.step + delay)
        if delay:
            self.waiting.append((self.step + delay, block))
        else:
            self.dropped(block)

    @rule()
    def retire(self) -> None:
        self.step += 1
        self.pool.retire(self.step)
        due = [block for step, block in self.waiting if step == self.step]
        self.waiting = [entry for entry in self.waiting if entry[0] > self.step]
        for i, block in enumerate(due):
            self.dropped(block, due[i + 1 :])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 6))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.keys:
            return
        self.pool.publish(block, key(name))
        if key(name) not in self.keys.values():
            self.keys[block] = key(name)

    def refs(self) -> Counter[int]:
        return Counter(self.held) + Counter(block for _, block in self.waiting)

    def dropped(self, block: int, still_due: list[int] | None = None) -> None:
        if self.refs()[block] == 0 and block not in (still_due or []) and block in self.keys:
            self.lru.append(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(Counter(self.held))
        refs = self.refs()
        assert [self.pool.refs(b) for b in range(self.SIZE)] == [refs[b] for b in range(self.SIZE)]
        assert self.pool.available == self.SIZE - len(refs)
        assert self.pool.num_cached == len(self.lru)
        assert {b: k for b, k in self.keys.items() if self.pool.lookup(k) != b} == {}


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)
TestPoolMachine = PoolMachine.TestCase


def test_a_block_that_was_hit_is_passed_over_once_for_each_hit() -> None:
    pool = BlockPool("g", 3)
    evicted = []
    for i in range(8):
        before = {j for j in range(i) if pool.lookup(key(j)) is not None}
        block = pool.allocate()
        evicted += [j for j in before if pool.lookup(key(j)) is None]
        pool.publish(block, key(i))
        pool.release(block, after=0)
        if not i:
            pool.note_use(block)
            pool.note_use(block)
        pool.check_integrity()
    # 0 is passed over before 1 and before 3.
    assert evicted == [1, 2, 3, 4, 0]


def test_an_adopted_block_is_found_and_evicted_in_its_order() -> None:
    pool = BlockPool("g", 3)
    pool.adopt([(2, key(0)), (0, key(1)), (7, key(2))])  # the pool has no block 7
    pool.check_integrity()
    assert (pool.lookup(key(0)), pool.lookup(key(1)), pool.lookup(key(2))) == (2, 0, None)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 0]
    pool.check_integrity()
