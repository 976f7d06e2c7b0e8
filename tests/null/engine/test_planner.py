"""Who computes what in a step: budget and chunks, what the cache gives, forks, rank."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegainfer.contract.event import FinishReason
from pegainfer.contract.step import StepPlan
from pegainfer.engine.scheduler import Scheduler
from tests.null.engine.driving import driver, finish, ids, prompt_tokens
from tests.null.engine.harness import BLOCK, HYBRID, Driver, request

# The budget


def test_a_long_prompt_is_computed_in_chunks_and_the_last_one_samples() -> None:
    d = driver(depth=1, max_tokens=16)
    d.add(request("r", ids(40), max_tokens=1))
    d.run()
    rows = [(r.start, r.count, r.sample) for plan in d.plans for r in plan.rows]
    assert rows == [(0, 16, False), (16, 16, False), (32, 8, True)]
    d.judge()


def test_max_prefill_tokens_bounds_chunks_but_not_decodes() -> None:
    d = driver(depth=1, max_tokens=16, config={"max_prefill_tokens": 5})
    d.add(request("a", ids(4), max_tokens=9, eos=()))
    d.step()
    d.add(request("b", ids(20, 5), max_tokens=1))
    d.run()
    steps = [sorted(r.count for r in plan.rows) for plan in d.plans[1:5]]
    assert steps == [[1, 5]] * 4


def test_decodes_come_first_and_prefill_takes_the_rest() -> None:
    d = driver(depth=1, max_tokens=8)
    for name in "ab":
        d.add(request(name, ids(3), max_tokens=20, eos=()))
    d.step()
    d.add(request("c", ids(30, 7), max_tokens=1))
    d.step()
    assert [(r.count, r.sample) for r in d.plans[-1].rows] == [(1, True), (1, True), (6, False)]


def test_steps_are_filled_to_the_runners_sizes() -> None:
    d = driver(depth=1, max_tokens=24, num_blocks=(256,))
    d.scheduler = Scheduler(msgspec.structs.replace(d.runner.info, fill_tokens=(8, 12)), d.config)

    def totals(steps: int) -> list[int]:
        first = len(d.plans)
        for _ in range(steps):
            d.step()
        return [plan.num_tokens for plan in d.plans[first:]]

    d.add(request("long", list(range(14)), max_tokens=50, eos=()))
    assert totals(3) == [12, 2, 1]  # nobody decodes: the large one
    d.add(request("short", [3] * 15, max_tokens=2, eos=()))
    assert totals(3) == [8, 8, 2]  # beside a row that decodes: the small one
    for i in range(4):
        d.add(request(f"queue{i}", [i] * 45, max_tokens=1, eos=()))
    assert totals(6) == [12, 12, 12, 12, 12, 8]  # until little enough waits
    d.run()
    d.judge()


def test_several_prompts_share_a_step() -> None:
    d = driver(depth=1, max_tokens=16)
    for i, name in enumerate("abc"):
        d.add(request(name, ids(6, i), max_tokens=1))
    d.step()
    assert [(r.count, r.sample) for r in d.plans[0].rows] == [(6, True), (6, True), (4, False)]


def test_the_oldest_prompt_progresses_even_where_decodes_fill_the_step() -> None:
    d = driver(depth=1, max_tokens=3, max_slots=4)
    d.add(request("long", ids(12), max_tokens=1, priority=-1))
    for name in "abc":
        d.add(request(name, [1], max_tokens=30, eos=()))
    for _ in range(40):
        d.step()
        if finish(d, "long"):
            break
    assert finish(d, "long") is FinishReason.LENGTH
    assert len(d.plans) <= 14


# The prefix cache


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (17, 16)])
def test_a_repeated_prompt_is_found_but_for_its_last_token(length: int, cached: int) -> None:
    d = driver()
    for name in "ab":
        d.add(request(name, ids(length), max_tokens=2))
        d.run()
    assert d.answers["b", 0].finish.num_cached_tokens == cached  # type: ignore[union-attr]
    d.judge()
    stats = d.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.cached_tokens) == (2 * length, cached, cached)


def test_an_answer_is_part_of_the_next_prompts_prefix() -> None:
    d = driver()
    d.add(request("a", ids(6), max_tokens=12, eos=()))
    d.run()
    prompt = [*ids(6), *d.answers["a", 0].tokens, 1, 2]
    d.add(request("b", prompt, max_tokens=1))
    d.run()
    assert d.answers["b", 0].finish.num_cached_tokens == 16  # type: ignore[union-attr]
    d.judge()


@pytest.mark.parametrize(
    ("config", "second"), [({"prefix_cache": False}, {}), ({}, {"salt": "x"}), ({}, {"prompt_logprobs": 0})]
)
def test_where_no_prefix_is_shared(config: dict[str, Any], second: dict[str, Any]) -> None:
    d = driver(config=config)
    d.add(request("a", ids(12), max_tokens=1))
    d.run()
    d.add(request("b", ids(12), max_tokens=1, **second))
    d.run()
    assert d.answers["b", 0].finish.num_cached_tokens == 0  # type: ignore[union-attr]
    d.judge()


# States (blocks of 4 tokens, states kept at multiples of 8)


def positions(plan: StepPlan) -> list[int]:
    return [snapshot.position for snapshot in plan.snapshots]


def test_states_are_kept_inside_a_chunk_and_the_next_request_starts_from_one() -> None:
    d = driver(depth=1, kv=HYBRID, num_blocks=(64, 16), max_tokens=32)
    d.add(request("a", ids(23), max_tokens=1))
    d.run()
    assert [(r.start, r.count) for plan in d.plans for r in plan.rows] == [(0, 23)]
    assert positions(d.plans[0]) == [8, 16, 20]  # equal steps, and the last boundary before the last token
    d.add(request("b", [*ids(20), 9, 9, 9], max_tokens=1))
    d.run()
    assert num_cached(d, "b") == 20
    d.add(request("c", [*ids(19), 9, 9, 9], max_tokens=1))
    d.run()
    assert num_cached(d, "c") == 16
    kept = {snapshot.position: snapshot.state for snapshot in d.plans[0].snapshots}
    assert [(c.group, c.src) for plan in d.plans for c in plan.copies] == [(1, kept[20]), (1, kept[16])]
    d.judge()


def test_a_prompt_keeps_at_most_a_quarter_of_the_states_in_one_row() -> None:
    d = driver(depth=1, kv=HYBRID, num_blocks=(64, 8), max_tokens=64)
    d.add(request("a", ids(35), max_tokens=1))
    d.run()
    assert [positions(plan) for plan in d.plans] == [[24, 32]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("commit", [1, 3, 6])
def test_the_next_turn_of_a_chat_starts_from_the_end_of_the_answer(depth: int, commit: int) -> None:
    device: dict[str, Any] = {"kv": HYBRID, "num_blocks": (64, 16), "max_tokens": 32, "max_commit": commit}
    d = driver(depth=depth, **device)
    d.add(request("a", ids(10), max_tokens=13, ignore_eos=True))
    d.run()
    turn = [*ids(10), *d.answers["a", 0].tokens]
    d.add(request("b", [*turn, 1, 2, 3], max_tokens=1))
    d.run()
    assert num_cached(d, "b") == 20  # of 22 computed tokens: the last of the 23 was drawn, not computed
    d.judge()


def test_a_long_answer_occupies_one_state_beside_its_own_and_its_prompts() -> None:
    d = driver(depth=1, kv=HYBRID, num_blocks=(64, 16), max_tokens=32)
    d.add(request("a", ids(10), max_tokens=40, ignore_eos=True))
    d.run()
    assert sum(len(plan.snapshots) for plan in d.plans) >= 10
    assert (
        d.scheduler._residents.homes[0].kv.pools[1].num_cached == 2
    )  # position 8 of the prompt, 48 of the answer


def num_cached(d: Driver, request_id: str) -> int:
    finish = d.answers[request_id, 0].finish
    assert finish is not None
    return finish.num_cached_tokens


# Drafts


def test_drafts_leave_room_in_the_budget_for_a_row_of_every_sequence() -> None:
    d = driver(depth=1, max_tokens=8, max_commit=4, max_slots=4)
    for i in range(4):
        d.add(request(f"r{i}", ids(3, i), max_tokens=12, ignore_eos=True))
    d.run()
    full = [plan for plan in d.plans if len(plan.rows) == 4 and all(row.count == 1 for row in plan.rows)]
    assert full and all([row.drafts for row in plan.rows] == [1] * 4 for plan in full)
    assert max(row.drafts for plan in d.plans for row in plan.rows) <= 3
    d.judge()


def test_rows_with_drafts_repeat() -> None:
    d = driver(depth=2, max_tokens=16, max_commit=3)
    d.add(request("a", ids(3), max_tokens=40, ignore_eos=True))
    d.run()
    assert sum(plan.repeats for plan in d.plans) > len(d.plans) // 2
    d.judge()


# Forks


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("length", [2, 9, 12, 13])
def test_a_prompt_is_computed_once_for_all_its_continuations(cache: bool, length: int) -> None:
    d = driver(config={"prefix_cache": cache})
    d.add(request("r", ids(length), n=4, max_tokens=6))
    d.run()
    d.judge()
    assert prompt_tokens(d.plans, length) == length - 1 + 4
    fork = next(plan for plan in d.plans if len(plan.news) == 3)
    assert len(fork.copies) == (3 if (length - 1) % BLOCK else 0)
    assert len({tuple(d.answers["r", i].tokens) for i in range(4)}) == 4  # seeds differ


def test_a_prompt_of_one_token_has_nothing_to_fork() -> None:
    d = driver()
    d.add(request("r", [5], n=3, max_tokens=4))
    d.run()
    d.judge()


@pytest.mark.parametrize("cache", [True, False])
def test_more_continuations_than_slots(cache: bool) -> None:
    d = driver(max_slots=2, config={"prefix_cache": cache})
    d.add(request("r", ids(9), n=5, max_tokens=3))
    d.run()
    d.judge()


def test_what_a_request_has_computed_itself_was_not_cached() -> None:
    """Continuations without a slot of their own find the first one's prompt in the cache."""
    d = driver(max_slots=1)
    for name, cached in (("a", 0), ("b", 8)):
        d.add(request(name, ids(10), n=3, max_tokens=3))
        d.run()
        found = {e.num_cached_tokens for i in range(3) for e in d.answers[name, i].events if e.finish}
        assert found == {cached}
    d.judge()


def test_forks_copy_states() -> None:
    d = driver(kv=HYBRID, num_blocks=(64, 8))
    d.add(request("r", ids(9), n=3, max_tokens=5))
    d.run()
    d.judge()
    assert sum(c.group == 1 for plan in d.plans for c in plan.copies) == 2


# Priority, age, fairness


def test_lower_priority_numbers_run_first() -> None:
    d = driver(max_slots=1)
    for name, priority in (("a", 0), ("b", 2), ("c", 1)):
        d.add(request(name, ids(4), priority=priority, max_tokens=2))
    d.run()
    ended = {name: d.answers[name, 0].finish.timings.finished for name in "abc"}  # type: ignore[union-attr]
    assert ended["a"] < ended["c"] < ended["b"]


def test_age_outweighs_priority() -> None:
    d = driver(max_slots=1, config={"aging_seconds": 5.0})
    d.add(request("running", ids(4), max_tokens=20, eos=(), priority=-9))
    d.step()
    d.add(request("old", ids(4), priority=1, max_tokens=2))
    d.now += 6.0
    d.add(request("young", ids(4), priority=0, max_tokens=2))
    d.run()
    times = {n: d.answers[n, 0].finish.timings for n in ("old", "young")}  # type: ignore[union-attr]
    assert times["old"].scheduled < times["young"].scheduled  # type: ignore[union-attr]


def test_an_endless_stream_of_urgent_requests_starves_nobody() -> None:
    d = driver(depth=2, max_slots=1, config={"aging_seconds": 10.0})
    d.add(request("patient", ids(6), priority=3, max_tokens=3, eos=()))
    for i in range(500):
        d.add(request(f"urgent{i}", ids(6, i), max_tokens=3, eos=()))
        for _ in range(8):
            d.step()
        if finish(d, "patient"):
            break
    # Three levels of ten seconds, then what was urgent at that time.
    assert d.now < 3 * 10 + 40
    assert finish(d, "patient") is FinishReason.LENGTH


def test_an_urgent_request_takes_the_slot_of_the_least_urgent() -> None:
    d = driver(max_slots=2)
    for name, priority in (("a", 1), ("b", 2)):
        d.add(request(name, ids(4), priority=priority, max_tokens=30, eos=()))
    for _ in range(4):
        d.step()
    d.add(request("urgent", ids(5), max_tokens=2, eos=()))
    for _ in range(6):
        d.step()
    assert finish(d, "urgent") is FinishReason.LENGTH
    assert d.scheduler.stats().preemptions == 1
    assert {seq.request.id for seq in d.running} == {"a", "b"}
    d.run()
    d.judge()


def test_equals_do_not_take_each_others_slots() -> None:
    d = driver(max_slots=1)
    for name in "ab":
        d.add(request(name, ids(4), max_tokens=9, eos=()))
    d.run()
    assert d.scheduler.stats().preemptions == 0
