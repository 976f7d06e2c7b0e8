"""A router's view of the prefix cache, made of events alone, beside the pools."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from pegainfer.contract.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pegainfer.contract.request import hash_blocks, pack_tokens, root_hash
from pegainfer.contract.step import KVSpec, PageGroup, StateGroup
from pegainfer.contract.tiers import Tier
from pegainfer.engine.cache_events import CacheEvents
from pegainfer.kv.events import external
from pegainfer.kv.manager import KVManager

FULL = PageGroup(name="full", block_size=4, bytes_per_block=1)
WIDE = PageGroup(name="wide", block_size=8, bytes_per_block=1, window=16)
STATE = StateGroup(name="state", bytes_per_state=1, snapshot_every=8)
ROOT = root_hash(None, "")


class Router:
    """What a subscriber knows: (group, medium) -> hash -> tokens of the whole prefix, where it knows them."""

    def __init__(self) -> None:
        self.view: dict[tuple[int | None, str | None], dict[int, tuple[int, ...] | None]] = {}
        self.batches: list[list[KVEvent]] = []
        self.closed = False

    def publish(self, events: Sequence[KVEvent], data_rank: int) -> None:
        assert data_rank == 0
        self.batches.append(list(events))
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.view.clear()
                continue
            known = self.view.setdefault((event.group_idx, event.medium), {})
            if isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    del known[key]
                continue
            prefix = () if event.parent_block_hash is None else self._prefix(event.parent_block_hash)
            for i, key in enumerate(event.block_hashes):
                part = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                prefix = None if prefix is None or len(part) < event.block_size else (*prefix, *part)
                assert key not in known
                known[key] = prefix

    def _prefix(self, parent: int) -> tuple[int, ...] | None:
        return next((blocks[parent] for blocks in self.view.values() if parent in blocks), None)

    def close(self) -> None:
        self.closed = True


def compute(kv: KVManager, tokens: list[int], adapter: str | None = None, salt: str = "") -> None:
    """A sequence that computes all its tokens, publishes them and ends."""
    root = root_hash(None if adapter is None else adapter.encode(), salt)
    keys = hash_blocks(pack_tokens(tokens), 4, parent=root)
    seq, _ = kv.begin(root, keys, kv.find(keys, len(tokens)), len(tokens), step=1)
    seq.adapter, seq.cache_salt = adapter, salt
    kv.publish(seq, array("i", tokens), len(tokens))
    kv.release(seq, after=0)


def held(kv: KVManager, kinds: Sequence[str]) -> dict[tuple[int | None, str | None], set[int]]:
    """What the pools of page groups have, as a router should see it."""
    out: dict[tuple[int | None, str | None], set[int]] = {}
    for g, group in enumerate(kv.groups):
        if isinstance(group, PageGroup):
            pools = [kv.pools[g]] + ([] if kv.tiers is None else [p for _, p in kv.tiers.kept_pools(g)])
            for kind, pool in zip(kinds, pools, strict=True):
                keys = [pool.key(b) for b in range(pool.num_blocks)]
                out[g, kind] = {external(key) for key in keys if key is not None}
    return out


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WIDE, STATE)], ids=["pages", "pages, window, state"])
def test_a_routers_view_is_what_the_pools_have(groups: tuple[PageGroup | StateGroup, ...]) -> None:
    rng = random.Random(7)
    tiers = (
        Tier(kind="host", num_blocks=(9,) * len(groups)),
        Tier(kind="disk", num_blocks=(6,) * len(groups)),
        Tier(kind="peer", num_blocks=(4,) * len(groups)),
    )
    kv = KVManager(KVSpec(groups), [12] * len(groups), tiers=tiers)
    router = Router()
    events = CacheEvents(router, [kv])
    assert kv.tiers is not None
    stored = 0
    for turn in range(400):
        length = rng.randrange(4, 33)
        compute(kv, [rng.randrange(2) for _ in range(8)] + list(range(8, length)))
        transfers = kv.tiers.saver.spill()
        for t in transfers:
            kv.tiers.end(t.id, landed=rng.random() < 0.9)
        if turn % 97 == 96:
            kv.reset_prefix_cache()
            assert not any(router.view.values())
        events.flush()
        seen = {place: set(blocks) for place, blocks in router.view.items() if blocks}
        have = {place: keys for place, keys in held(kv, ("GPU", "CPU", "DISK")).items() if keys}
        assert seen == have
        stored += sum(len(keys) for keys in have.values())
        for blocks in router.view.values():
            for key, prefix in blocks.items():
                if prefix is not None:
                    assert external(hash_blocks(pack_tokens(prefix), 4, parent=ROOT)[-1]) == key
    assert stored > 400
    assert {medium for _, medium in router.view} == {"GPU", "CPU", "DISK"}
    events.close()
    assert router.closed


def test_the_blocks_of_one_prompt_are_one_event_with_its_tokens_and_labels() -> None:
    kv = KVManager(KVSpec((FULL,)), [8])
    router = Router()
    events = CacheEvents(router, [kv])
    compute(kv, list(range(10)), adapter="poet", salt="mine")
    events.flush()
    ((event,),) = router.batches
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids, event.block_size) == (None, list(range(8)), 4)
    assert (event.medium, event.lora_name, event.lora_id) == ("GPU", "poet", None)
    assert event.extra_keys == [("poet", "mine"), ("poet",)]
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
    compute(kv, list(range(14)), adapter="poet", salt="mine")
    events.flush()
    (longer,) = router.batches[1]
    assert isinstance(longer, BlockStored)
    assert (longer.parent_block_hash, longer.token_ids) == (event.block_hashes[-1], [8, 9, 10, 11])


def test_blocks_that_an_earlier_run_left_on_a_disk_are_told_without_tokens() -> None:
    keys = hash_blocks(pack_tokens(list(range(8))), 4, parent=ROOT)
    disk = Tier(kind="disk", num_blocks=(4,), stored=(((0, keys[0]), (2, keys[1])),))
    kv = KVManager(KVSpec((FULL,)), [8], tiers=(disk,))
    router = Router()
    CacheEvents(router, [kv])
    assert router.view == {(0, "DISK"): {external(keys[0]): None, external(keys[1]): None}}


def test_tokens_are_not_told_of_a_block_before_theirs_whose_tokens_are_unknown() -> None:
    tokens = list(range(9))
    keys = hash_blocks(pack_tokens(tokens), 4, parent=ROOT)
    disk = Tier(kind="disk", num_blocks=(4,), stored=(((0, keys[0]),),))
    kv = KVManager(KVSpec((FULL,)), [8], tiers=(disk,))
    router = Router()
    events = CacheEvents(router, [kv])
    assert kv.tiers is not None
    load = kv.tiers.load("owner", keys, 9, kv.find(keys, 9), [0])
    assert load is not None
    for transfer in load.transfers:
        kv.tiers.end(transfer.id, landed=True)
    compute(kv, tokens)  # with the loaded block as its prefix, before the next flush
    events.flush()
    assert router.view[0, "GPU"] == {external(keys[0]): None, external(keys[1]): None}


def test_nothing_is_told_of_steps_that_change_nothing() -> None:
    kv = KVManager(KVSpec((FULL,)), [8])
    router = Router()
    events = CacheEvents(router, [kv])
    compute(kv, list(range(8)))
    events.flush()
    compute(kv, list(range(8)))
    events.flush()
    events.flush()
    assert len(router.batches) == 1
