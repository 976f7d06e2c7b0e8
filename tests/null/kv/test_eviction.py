"""The order in which a lower tier evicts: by priority, by shares of tenants, by age; and what ends that."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.eviction import STALE_TURNS, OwnedBlocks, Owner


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def pool_of(*owners: Owner) -> BlockPool:
    """A pool full of cached blocks: block i is of owner i, and block 0 was released first."""
    pool = BlockPool("g", len(owners), by_owner=True)
    for i, owner in enumerate(owners):
        pool.publish(pool.allocate(), key(i), owner)
    for block in range(len(owners)):
        pool.release(block, after=0)
    return pool


def evictions(pool: BlockPool) -> list[int]:
    """Blocks in the order of their eviction."""
    return [pool.allocate() for _ in range(pool.available)]


def test_the_least_important_goes_first_whenever_it_was_used() -> None:
    pool = pool_of(Owner(0), Owner(5), Owner(-1), Owner(5), Owner(2))
    assert evictions(pool) == [1, 3, 4, 0, 2]


def test_the_tenant_with_the_most_blocks_loses_its_oldest() -> None:
    a, b, c = Owner(0, "a"), Owner(0, "b"), Owner(0, "c")
    pool = pool_of(b, a, a, c, a, a, b)
    first = [pool.allocate() for _ in range(3)]
    assert first[:2] == [1, 2]  # a falls from four to two, as many as b has
    assert first[2] in (0, 4)
    pool.check_integrity(Counter(first))
    assert set(first) | set(evictions(pool)) == set(range(7))


def test_one_owner_alone_is_evicted_by_age_and_hits_put_it_off() -> None:
    pool = pool_of(*[Owner()] * 4)
    pool.note_use(0)
    pool.note_use(1)
    pool.note_use(1)
    assert evictions(pool) == [2, 3, 0, 1]


def test_a_block_is_as_important_as_its_most_important_user() -> None:
    pool = pool_of(Owner(3, "a"), Owner(1, "b"))
    pool.acquire(0)
    pool.use_for(0, Owner(0, "c"))
    pool.release(0, after=0)
    assert pool.owner(0) == Owner(0, "c")
    pool.acquire(0)
    pool.use_for(0, Owner(9, "d"))
    pool.release(0, after=0)
    assert pool.owner(0) == Owner(0, "d")
    assert evictions(pool) == [1, 0]


def test_room_is_refused_to_what_is_less_important_than_all_that_is_there() -> None:
    pool = pool_of(Owner(1), Owner(2))
    assert pool.takes(Owner(2)) and pool.takes(Owner(0)) and not pool.takes(Owner(3))
    pool.forget(1)
    assert pool.takes(Owner(3))  # a free block
    pool.allocate()
    assert pool.takes(Owner(1)) and not pool.takes(Owner(2))
    pool.allocate()
    assert not pool.takes(Owner(0))  # all are used


def test_important_blocks_that_nobody_uses_are_evicted_in_the_end() -> None:
    pool = pool_of(Owner(-5), Owner(0), Owner(0), Owner(0))
    last = STALE_TURNS * pool.num_blocks
    for turn in range(last):
        block = pool.allocate()
        assert block != 0, turn
        pool.publish(block, key(10 + turn), Owner(0))
        pool.release(block, after=0)
    assert pool.takes(Owner(7))
    assert pool.allocate() == 0


def test_a_settled_block_is_the_next_of_its_owner() -> None:
    pool = pool_of(*[Owner()] * 3)
    pool.acquire(2)
    pool.settle(2)
    assert evictions(pool) == [2, 0, 1]


def test_a_priority_that_comes_and_goes_is_noted_once() -> None:
    """Otherwise each use of the only important block would cost memory for good."""
    pool = pool_of(Owner(5), Owner(1))
    for _ in range(100):
        pool.acquire(1)
        pool.release(1, after=0)
    assert isinstance(pool._cached, OwnedBlocks)
    assert sorted(pool._cached._worst) == [-5, -1]
    assert evictions(pool) == [0, 1]
    pool.release(0, 1, after=0)
    for priority in (1, 5, 1):
        block = pool.allocate()
        pool.publish(block, key(10 + priority), Owner(priority))
        pool.release(block, after=0)
    assert sorted(pool._cached._worst) == [-5, -1]


def test_random_operations_agree_with_a_plain_search() -> None:
    """Each victim is the oldest block of a tenant with the most blocks, of the least important priority."""
    r = random.Random(4)
    owners = [Owner(r.randrange(3), r.choice("abc")) for _ in range(30)]
    blocks = OwnedBlocks(30, owners)
    model: list[int] = []  # in the order of their release
    evicted = 0
    for _ in range(2000):
        out = [i for i in range(30) if i not in model]
        kind = r.random()
        if out and kind < 0.5:
            block = r.choice(out)
            owners[block] = Owner(r.randrange(3), r.choice("abc"))
            blocks[block] = None
            model.append(block)
        elif model and kind < 0.7:
            block = r.choice(model)
            del blocks[block]
            model.remove(block)
        elif model and kind < 0.98:
            worst = max(owners[i].priority for i in model)
            tenants = defaultdict(list)
            for i in model:
                if owners[i].priority == worst:
                    tenants[owners[i].tenant].append(i)
            most = max(map(len, tenants.values()))
            block, _ = blocks.popitem(last=False)
            assert block in {of[0] for of in tenants.values() if len(of) == most}
            model.remove(block)
            evicted += 1
        elif kind > 0.995:
            blocks.clear()
            model.clear()
        assert list(blocks) == model
    assert evicted > 300
