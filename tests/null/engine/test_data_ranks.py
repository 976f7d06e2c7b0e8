"""Where sequences are placed among data-parallel ranks, and what each rank keeps for itself."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import StepPlan
from pegainfer.contract.tiers import DEVICE, Tier
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.driving import ids
from tests.null.engine.harness import Driver, null_config, request


def driver(ranks: int = 2, config: dict[str, Any] | None = None, tensor: int = 1, **device: Any) -> Driver:
    """Each rank has 2 slots and 16 blocks of 4 tokens, and computes 16 tokens a step."""
    small = {"max_slots": 2, "num_blocks": (16,)} | device
    return Driver(null_config(**small), SchedulerConfig(**(config or {})), ranks=(tensor, ranks))


def homes(d: Driver) -> dict[str, int]:
    """The data-parallel rank of each running request."""
    return {seq.request.id: seq.data_rank for seq in d.running}


def slots(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return sorted(row.slot for row in plan.rows)


def test_sequences_go_where_the_fewest_run() -> None:
    d = driver(ranks=2)
    for name in "abcd":
        d.add(request(name, ids(3, ord(name)), max_tokens=6, eos=()))
    assert slots(d.launch()) == [0, 1, 2, 3]  # slots 0 and 1 are the first rank's
    assert homes(d) == {"a": 0, "b": 1, "c": 0, "d": 1}
    d.run()
    d.judge()


def test_each_rank_has_a_token_budget_of_its_own() -> None:
    d = driver(ranks=3)
    for name in "abc":
        d.add(request(name, ids(16, ord(name)), max_tokens=2, eos=()))
    plan = d.launch()
    assert plan is not None
    assert [row.count for row in plan.rows] == [16, 16, 16]
    d.run()
    d.judge()


def test_a_prompt_goes_where_its_prefix_is_cached() -> None:
    d = driver()
    d.add(request("first", ids(13), max_tokens=1))
    d.add(request("other", ids(13, 5), max_tokens=1))
    d.run()
    for name, first in (("again", 5), ("more", 5)):
        d.add(request(name, ids(13, first), max_tokens=4, eos=()))
        d.step()
    assert set(homes(d).values()) == {1}
    d.run()
    d.judge()
    assert [d.answers[name, 0].events[0].num_cached_tokens for name in ("again", "more")] == [12, 12]


def test_a_prompt_goes_where_a_lower_tier_has_its_prefix() -> None:
    d = driver(tiers=(Tier(kind="host", num_blocks=(64,)),), transfer_steps=1)
    d.add(request("first", ids(1), max_tokens=1))
    d.add(request("other", ids(13, 5), max_tokens=1))
    d.run()
    kv = d.scheduler._residents.homes[1].kv
    # The device's blocks go down, and are then evicted from it.
    for i in range(8):
        d.add(request(f"fill{i}", ids(40, 7 + i), max_tokens=1))
        d.run()
    for block in range(kv.pools[0].num_blocks):
        kv.pools[0].forget(block)
    d.add(request("again", ids(13, 5), max_tokens=4, eos=()))
    d.run()
    d.judge()
    loads = [t for plan in d.plans for t in plan.transfers if t.target_pool == DEVICE]
    assert {t.rank for t in loads} == {1}
    assert d.answers["again", 0].events[0].num_cached_tokens == 12


def test_a_full_rank_does_not_keep_anybody_from_another() -> None:
    d = driver()
    d.add(request("a", ids(9), max_tokens=30, eos=()))
    d.step()
    d.add(request("b", ids(9), max_tokens=30, eos=()))  # its prefix is on rank 0 once a's prompt is committed
    d.step()
    d.add(request("c", ids(9), max_tokens=30, eos=()))
    d.add(request("d", ids(9), max_tokens=30, eos=()))
    while len(d.running) < 4:
        d.step()
    assert sorted(homes(d).values()) == [0, 0, 1, 1]
    d.run()
    d.judge()


def test_forks_stay_with_their_parent() -> None:
    d = driver()
    d.add(request("r", ids(9), n=2, max_tokens=8, eos=()))
    while len(d.running) < 2:
        d.step()
    assert len({seq.data_rank for seq in d.running}) == 1
    d.run()
    d.judge()


def test_only_sequences_of_the_same_rank_are_preempted_for_blocks() -> None:
    d = driver(config={"watermark": 0.0, "prefix_cache": False}, num_blocks=(12,))
    for name in "abc":  # a and c share rank 0; b has rank 1 to itself
        d.add(request(name, ids(8, ord(name)), max_tokens=30, eos=()))
    preempted: set[str] = set()
    while d.scheduler.has_work():
        d.step()
        preempted |= {seq.request.id for seq in d.waiting if seq.entered}
    assert preempted == {"c"}
    d.judge()


def test_who_is_urgent_displaces_the_worst_of_all_ranks() -> None:
    d = driver(config={"prefix_cache": False}, max_slots=1)
    d.add(request("low", ids(3), max_tokens=20, priority=2, eos=()))
    d.add(request("middle", ids(3, 1), max_tokens=20, priority=1, eos=()))
    for _ in range(4):
        d.step()
    d.add(request("urgent", ids(3, 2), max_tokens=5, priority=-1, eos=()))
    while "urgent" not in homes(d):
        d.step()
    assert homes(d).keys() == {"urgent", "middle"}
    d.run()
    d.judge()


def test_a_reset_clears_every_tier_of_every_rank() -> None:
    d = driver(tiers=(Tier(kind="host", num_blocks=(64,)),), transfer_steps=1, tensor=2)
    for i in range(12):
        d.add(request(f"r{i}", ids(40, i), max_tokens=1))
        d.run()
    tiers = [home.kv.tiers for home in d.scheduler._residents.homes]
    assert all(t is not None and t._levels[0].pools[1].num_cached for t in tiers)
    d.add(request("running", ids(20), max_tokens=20, eos=()))
    while not d.running:  # its prefix is loaded first
        d.step()
    d.reset_prefix_cache()  # asserts that no pool finds anything
    d.run()
    for name, prompt in (("again", ids(40, 11)), ("more", [*ids(20), *d.answers["running", 0].tokens])):
        d.add(request(name, prompt, max_tokens=1))
        d.run()
        assert d.answers[name, 0].events[0].num_cached_tokens == 0
    d.judge()


def test_statistics_count_the_blocks_of_all_ranks() -> None:
    assert driver(ranks=3).scheduler.stats().total_blocks == 48


def test_slots_are_divided_among_the_ranks() -> None:
    d = driver(ranks=3, config={"max_slots": 4})
    assert [list(home.slots) for home in d.scheduler._residents.homes] == [[0, 1], [2], [4]]
    with pytest.raises(ConfigError, match="expected max_slots of 3 or more; got 2"):
        driver(ranks=3, config={"max_slots": 2})
