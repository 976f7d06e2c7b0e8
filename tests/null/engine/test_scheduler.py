"""The scheduler's rules one by one: budget, chunks, order, forks, preemption, ends."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import FinishReason
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.engine.admission import derived_seed
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig
from tests.null.engine.harness import BLOCK, EOS, HYBRID, Driver, null_config, request


def driver(depth: int = 2, config: dict[str, Any] | None = None, **device: Any) -> Driver:
    return Driver(null_config(**device), SchedulerConfig(pipeline_depth=depth, **(config or {})))


def finish(d: Driver, request_id: str, index: int = 0) -> Any:
    event = d.answers[request_id, index].finish
    return event and event.finish


def ids(count: int, first: int = 0) -> list[int]:
    return [(first + i) % 20 for i in range(count)]


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


# The pipeline


def test_depth_two_follows_uncommitted_tokens() -> None:
    d = driver(depth=2)
    d.add(request("r", ids(4), max_tokens=3, eos=()))
    first, second = d.launch(), d.launch()
    assert first is not None and second is not None
    assert [(r.start, r.count, r.follow) for r in second.rows] == [(4, 1, True)]
    assert d.launch() is None  # the pipeline is full
    d.run()
    d.judge()
    assert [len(p.rows) for p in d.plans] == [1, 1, 1]  # the end by length is known in advance


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_say_where_they_repeat_the_one_before(depth: int) -> None:
    d = driver(depth, max_tokens=64)
    d.add(request("a", ids(20), max_tokens=8, eos=()))
    d.add(request("b", ids(10, 5), max_tokens=4, eos=()))
    d.run()
    assert sum(plan.repeats for plan in d.plans) > 4
    for before, plan in zip(d.plans, d.plans[1:], strict=False):
        goes_on = [(r.slot, r.start + 1, 1) for r in before.rows]
        alike = [(r.slot, r.start, r.count) for r in plan.rows] == goes_on
        assert plan.repeats == (alike and all(r.count == 1 for r in before.rows))


def test_depth_one_never_follows() -> None:
    d = driver(depth=1)
    d.add(request("r", ids(4), max_tokens=8, eos=()))
    d.run()
    assert not any(r.follow for plan in d.plans for r in plan.rows)


def test_a_stop_costs_at_most_one_wasted_row() -> None:
    wasted = []
    for depth in (1, 2):
        d = driver(depth=depth)
        d.add(request("r", ids(4), stop_token_ids=tuple(range(20))))
        d.run()
        assert finish(d, "r") is FinishReason.STOP
        wasted.append(d.counts["wasted rows"])
    assert wasted == [0, 1]


def test_a_slot_is_reused_only_after_its_last_plan_is_committed() -> None:
    d = driver(depth=2, max_slots=1)
    d.add(request("a", ids(4), stop_token_ids=tuple(range(20))))
    d.add(request("b", ids(4, 9), max_tokens=1))
    d.launch()
    wasted = d.launch()
    assert wasted is not None and wasted.rows[0].follow
    d.commit()
    assert finish(d, "a") is FinishReason.STOP
    assert d.launch() is None  # the wasted row still uses the slot
    d.commit()
    plan = d.launch()
    assert plan is not None
    assert (plan.frees, plan.news[0].slot) == ((0,), 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [2, 4])
def test_rows_that_commit_several_tokens(depth: int, k: int) -> None:
    d = driver(depth=depth, max_commit=k, zero_commits=0.2)
    d.add(request("r", ids(7), max_tokens=30, eos=()))
    d.run()
    d.judge()
    assert max(len(new) for result in d.results for new in result.tokens) == k
    follows = [r.start for plan in d.plans for r in plan.rows if r.follow]
    assert bool(follows) == (depth == 2)


def test_tokens_beyond_max_tokens_are_dropped() -> None:
    d = driver(depth=1, max_commit=4)
    d.add(request("r", ids(7), max_tokens=5, eos=()))
    d.run()
    drawn = sum(len(new) for result in d.results for new in result.tokens)
    assert len(d.answers["r", 0].tokens) == 5
    d.judge()
    assert drawn >= 5


def test_plans_are_committed_in_order() -> None:
    d = driver(depth=2)
    d.add(request("r", ids(4), max_tokens=5, eos=()))
    d.launch()
    second = d.launch()
    assert second is not None
    with pytest.raises(InvariantError, match="not the oldest"):
        d.scheduler.commit(second, StepResult(step=second.step, tokens=((1,),)), 0.0)


@pytest.mark.parametrize("result", [StepResult(step=9, tokens=((1,),)), StepResult(step=1, tokens=())])
def test_a_result_must_fit_its_plan(result: StepResult) -> None:
    d = driver()
    d.add(request("r", ids(4)))
    plan, _ = d.scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(InvariantError, match="for plan 1"):
        d.scheduler.commit(plan, result, 1.0)


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


def test_a_chunk_ends_at_a_snapshot_and_the_next_request_starts_from_it() -> None:
    d = driver(depth=1, kv=HYBRID, num_blocks=(64, 8), max_tokens=32)
    d.add(request("a", ids(21), max_tokens=1))
    d.run()
    assert [(r.start, r.count) for plan in d.plans for r in plan.rows] == [(0, 16), (16, 5)]
    assert len(d.plans[0].snapshots) == 1
    d.add(request("b", [*ids(16), 9, 9, 9], max_tokens=1))
    d.run()
    assert d.answers["b", 0].finish.num_cached_tokens == 16  # type: ignore[union-attr]
    copies = d.plans[-1].copies
    assert [(c.group, c.src) for c in copies] == [(1, d.plans[0].snapshots[0].dst)]
    d.judge()


# Forks


def prompt_tokens(plans: list[StepPlan], length: int) -> int:
    """Prompt positions computed over all plans."""
    return sum(max(0, min(r.start + r.count, length) - r.start) for plan in plans for r in plan.rows)


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


# Seeds and what the runner is told


def test_index_0_has_the_requests_seed_and_others_their_own() -> None:
    d = driver()
    d.add(request("r", ids(5), n=3, seed=123, max_tokens=1))
    d.run()
    seeds = [new.seed for plan in d.plans for new in plan.news]
    assert seeds[0] == 123
    assert seeds == [derived_seed(123, i) for i in range(3)]
    assert len(set(seeds)) == 3


def test_a_negative_seed_is_taken_modulo_2_to_the_64() -> None:
    d = driver()
    d.add(request("r", ids(5), seed=-1))
    d.step()
    assert d.plans[0].news[0].seed == 2**64 - 1


def test_missing_seeds_are_drawn_from_the_given_generator() -> None:
    def seeds(generator: int) -> list[int]:
        s = Scheduler(Driver().runner.info, rng=random.Random(generator))
        for name in "ab":
            s.add(GenerateRequest(id=name, prompt=pack_tokens([1, 2])), 0.0)
        plan, _ = s.schedule(0.0)
        assert plan is not None
        return [new.seed for new in plan.news]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 2


def test_what_a_new_slot_says() -> None:
    d = driver()
    d.add(request("r", ids(5), min_tokens=2, stop_token_ids=(4,)))
    d.step()
    (new,) = d.plans[0].news
    assert new.tokens == pack_tokens(ids(5))
    assert (new.num_prompt, new.mask_tokens, new.sampling.min_tokens) == (5, (EOS, 4), 2)


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


# Blocks run out


def test_the_youngest_is_preempted_and_its_tokens_do_not_change() -> None:
    d = driver(num_blocks=(12,), config={"watermark": 0.0, "prefix_cache": False})
    for name in "abc":
        d.add(request(name, ids(8, ord(name)), max_tokens=30, eos=()))
    preempted: set[str] = set()
    while d.scheduler.has_work():
        d.step()
        preempted |= {seq.request.id for seq in d.waiting if seq.entered}
    assert preempted == {"b", "c"}  # never the oldest
    assert d.scheduler.stats().preemptions >= 2
    d.judge()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    d = driver(num_blocks=(16,), config={"watermark": 0.0})
    for name in "ab":
        d.add(request(name, ids(20, ord(name)), max_tokens=20, eos=()))
    d.run()
    d.judge()
    assert d.scheduler.stats().preemptions > 0
    again = [r for plan in d.plans for new in plan.news for r in plan.rows if r.slot == new.slot and r.start]
    assert again  # it started beyond position 0


def test_a_preempted_sequence_waits_for_its_last_tokens() -> None:
    d = driver(depth=2)
    d.add(request("r", ids(6), max_tokens=9, eos=()))
    d.launch()
    d.scheduler._residents.preempt(d.running[0])
    assert d.launch() is None  # there is room, but the token in flight is not known yet
    d.commit()
    assert d.answers["r", 0].tokens == d.expected("r", 0)[:1]
    plan = d.launch()
    assert plan is not None
    assert plan.news[0].tokens == pack_tokens([*ids(6), *d.answers["r", 0].tokens])
    d.run()
    d.judge()


def test_admission_leaves_the_watermark() -> None:
    d = driver(depth=1, num_blocks=(10,), max_tokens=64, config={"watermark": 0.5})
    d.add(request("a", ids(8), max_tokens=2, eos=()))
    d.add(request("b", ids(16, 3), max_tokens=2, eos=()))
    d.step()
    # 10 blocks, 2 taken: b's 4 would leave 4, under the 5 of the watermark.
    assert [seq.request.id for seq in d.running] == ["a"]
    d.run()
    d.judge()


def test_alone_the_watermark_does_not_hold() -> None:
    d = driver(num_blocks=(10,), max_tokens=64, config={"watermark": 0.9})
    d.add(request("a", ids(30), max_tokens=2))
    d.run()
    d.judge()


# Ends


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("n", [1, 3])
def test_cancel_takes_effect_at_the_next_schedule_in_every_state(depth: int, steps: int, n: int) -> None:
    """With 21 prompt tokens and 8 a step, the steps pass through queue, prefill, fork and decode."""
    d = driver(depth=depth, max_tokens=8)
    d.add(request("r", ids(21), n=n, max_tokens=30, eos=()))
    for _ in range(steps):
        d.step()
    d.cancel("r")
    d.cancel("r")
    d.cancel("unknown")
    assert not any(a.finish for a in d.answers.values())
    d.launch()
    assert [finish(d, "r", i) for i in range(n)] == [FinishReason.ABORT] * n
    d.run()
    d.judge()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("index", [0, 1, 2])
def test_cancel_of_one_index_leaves_the_others(depth: int, steps: int, index: int) -> None:
    """Through queue, prefill, fork and decode; index 0 goes on until the others are forked from it."""
    d = driver(depth=depth, max_tokens=8)
    d.add(request("r", ids(21), n=3, max_tokens=30, eos=()))
    for _ in range(steps):
        d.step()
    forked = not any(seq.children for seq in (*d.waiting, *d.running))
    d.cancel("r", index)
    d.cancel("r", index)
    d.cancel("r", 7)
    d.launch()
    d.scheduler.check_integrity()
    if index or forked:
        assert finish(d, "r", index) is FinishReason.ABORT
    d.run()
    others = [i for i in range(3) if i != index]
    assert [finish(d, "r", i) for i in others] == [FinishReason.LENGTH] * 2
    assert finish(d, "r", index) is FinishReason.ABORT
    assert len(d.answers["r", index].tokens) < 30
    d.judge()


def test_a_cancel_that_had_to_wait_is_not_for_the_next_request_of_its_name() -> None:
    d = driver(max_tokens=8)
    s = d.scheduler
    first, second = (request("r", ids(21), n=2, max_tokens=5, eos=()) for _ in range(2))
    s.add(first, 0.0)
    d.step()
    s.cancel("r", 0)  # it goes on until the other is forked from it
    s.cancel("r", None)
    _, events = s.schedule(0.0)
    assert [(e.index, e.finish) for e in events] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    d.add(second)
    d.run()
    assert [finish(d, "r", i) for i in range(2)] == [FinishReason.LENGTH] * 2


def test_a_parent_without_its_children_goes_on_alone() -> None:
    d = driver(max_tokens=8)
    d.add(request("r", ids(21), n=2, max_tokens=5, eos=()))
    d.step()
    d.cancel("r", 1)
    d.run()
    assert [finish(d, "r", i) for i in range(2)] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert d.answers["r", 1].tokens == []
    d.judge()


def test_cancel_of_a_preempted_sequence() -> None:
    d = driver(num_blocks=(12,), config={"watermark": 0.0, "prefix_cache": False})
    for name in "abc":
        d.add(request(name, ids(8, ord(name)), max_tokens=30, eos=()))
    while not any(seq.entered for seq in d.waiting):
        d.step()
    victim = next(seq.request.id for seq in d.waiting if seq.entered)
    d.cancel(victim)
    d.launch()
    assert finish(d, victim) is FinishReason.ABORT
    d.run()
    d.judge()


@pytest.mark.parametrize("busy", [False, True], ids=["running", "waiting"])
def test_a_deadline_ends_a_request_wherever_it_is(busy: bool) -> None:
    d = driver(max_slots=1)
    if busy:
        d.add(request("other", ids(4), max_tokens=30, eos=(), priority=-5))
        d.step()
    d.add(request("r", ids(4), n=2, max_tokens=50, eos=(), deadline=d.now + 6.0))
    for _ in range(5):
        d.step()
    assert finish(d, "r") is None
    d.step()
    d.step()
    for index in range(2):
        event = d.answers["r", index].finish
        assert event is not None
        assert (event.finish, event.error_kind) == (FinishReason.ERROR, "DeadlineError")
        assert "deadline" in (event.error or "")
    d.run()
    d.judge()


def test_a_deadline_of_an_ended_request_harms_no_other_of_its_name() -> None:
    d = driver()
    d.add(request("r", ids(4), max_tokens=1, deadline=50.0))
    d.run()
    d.scheduler.add(request("r", ids(4), max_tokens=50, eos=()), d.now)
    d.now = 60.0
    _, events = d.scheduler.schedule(d.now)
    assert events == []


def test_who_waits_too_long_is_given_up_and_who_runs_goes_on() -> None:
    d = Driver(null_config(max_slots=1), SchedulerConfig(max_wait_seconds=5.0, pipeline_depth=1))
    d.add(request("runs", [1] * 4, max_tokens=20, eos=()))
    d.step()
    d.add(request("waits", [2] * 4, n=2, max_tokens=2, eos=()))
    d.run()
    d.judge()
    assert finish(d, "runs") is FinishReason.LENGTH
    for index in (0, 1):
        end = d.answers["waits", index].finish
        assert end is not None
        assert (end.finish, end.error_kind) == (FinishReason.ERROR, "DeadlineError")
        assert end.error == "the request was not started within 5 s; remedy: try again later"
        assert end.timings is not None and end.timings.finished - end.timings.admitted == 5.0


def test_no_token_asked_for() -> None:
    d = driver()
    d.add(request("r", ids(9), n=2, max_tokens=0))
    _, events = d.scheduler.schedule(2.0)
    assert [(e.index, e.tokens, e.finish) for e in events] == [(0, (), "length"), (1, (), "length")]
    assert not d.scheduler.has_work()


def test_no_token_but_the_prompts_logprobs() -> None:
    d = driver(max_tokens=8)
    d.add(request("r", ids(21), n=2, max_tokens=0, prompt_logprobs=2))
    d.run()
    d.judge()
    event = d.answers["r", 0].finish
    assert event is not None and event.prompt_logprobs is not None
    assert [len(p.top) for p in event.prompt_logprobs if p] == [2] * 20
    assert prompt_tokens(d.plans, 21) == 20


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_prompt_logprobs_are_complete_after_chunks_and_preemptions(num_blocks: int) -> None:
    d = driver(max_tokens=7, num_blocks=(num_blocks,), config={"watermark": 0.0})
    d.add(request("other", ids(20), max_tokens=30, eos=()))
    d.add(request("r", ids(20, 5), n=2, max_tokens=20, prompt_logprobs=1, logprobs=1))
    d.run()
    d.judge()
    told = [new.sampling.prompt_logprobs for plan in d.plans for new in plan.news]
    assert told.count(1) >= 1
    assert (d.scheduler.stats().preemptions > 0) == (num_blocks == 14)


def failing(slot: int, step: int) -> Any:
    def faults(plan: StepPlan) -> dict[int, str]:
        return {i: "not finite" for i, row in enumerate(plan.rows) if (row.slot, plan.step) == (slot, step)}

    return faults


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_row_ends_its_sequence_alone(depth: int) -> None:
    d = driver(depth=depth, faults=failing(1, 4))
    for name in "abc":
        d.add(request(name, ids(4, ord(name)), max_tokens=9, eos=()))
    d.run()
    assert [finish(d, name) for name in "abc"] == ["length", "error", "length"]
    assert d.answers["b", 0].finish.error == "not finite"  # type: ignore[union-attr]
    d.judge()


def test_a_failed_prompt_ends_all_that_would_fork_from_it() -> None:
    d = driver(max_tokens=8, faults=failing(0, 2))
    d.add(request("r", ids(20), n=3, max_tokens=9))
    d.run()
    assert [finish(d, "r", i) for i in range(3)] == ["error"] * 3
    d.judge()


def test_a_failed_chunk_leaves_nothing_in_the_cache() -> None:
    d = driver(max_tokens=8, faults=failing(0, 2))
    d.add(request("r", ids(20), max_tokens=9))
    d.run()
    d.add(request("s", ids(20), max_tokens=2))
    d.run()
    assert d.answers["s", 0].finish.num_cached_tokens == 8  # type: ignore[union-attr]
    d.judge()


# What is counted


def test_timings_name_each_door() -> None:
    d = driver(depth=1, max_slots=1)
    d.add(request("a", ids(4), max_tokens=3, eos=()))
    d.add(request("b", ids(4), max_tokens=2, eos=()))
    d.run()
    t = d.answers["b", 0].finish.timings  # type: ignore[union-attr]
    assert t is not None
    assert (t.arrival, t.admitted, t.scheduled, t.first_token, t.finished) == (1.0, 1.0, 5.0, 5.0, 6.0)


def test_stats_count_what_happened() -> None:
    d = driver(max_slots=1)
    for name in "ab":
        d.add(request(name, ids(9), n=2, max_tokens=3, eos=()))
    d.launch()
    stats = d.scheduler.stats()
    assert (stats.running, stats.waiting, stats.in_flight) == (1, 3, 1)
    assert (stats.free_blocks, stats.total_blocks) == (62, 64)
    d.run()
    stats = d.scheduler.stats()
    assert stats.steps == len(d.plans)
    assert (stats.prompt_tokens, stats.generation_tokens) == (18, 12)
    assert stats.finished == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    assert stats.last_step == d.now


def test_steps_are_counted_by_kind_and_size() -> None:
    null = null_config(virtual=True, step_seconds=0.5)
    d = Driver(null, SchedulerConfig(pipeline_depth=1))
    d.add(request("a", [1] * 9, max_tokens=4, eos=()))
    d.step()
    d.step()
    d.add(request("b", [2] * 6, max_tokens=2, eos=()))
    d.run()
    stats = d.scheduler.stats()
    assert stats.kind_steps == {"prefill": 1, "decode": 2, "mixed": 1}
    assert stats.kind_seconds == {"prefill": 0.5, "decode": 1.0, "mixed": 0.5}
    # 9 tokens of a; 1 of a; 1 of a and 6 of b; 1 of each
    assert stats.step_sizes[:6] == (0, 1, 1, 1, 1, 0) and sum(stats.step_sizes) == stats.steps
    assert stats.step_tokens == 9 + 1 + 7 + 2


def test_sampling_params_reach_the_runner_unchanged() -> None:
    sampling = SamplingParams(temperature=0.5, top_k=3, logit_bias=((1, 2.0),), seed=1)
    s = Scheduler(Driver().runner.info)
    s.add(GenerateRequest(id="r", prompt=pack_tokens([1, 2]), sampling=sampling), 0.0)
    plan, _ = s.schedule(0.0)
    assert plan is not None and plan.news[0].sampling == sampling
