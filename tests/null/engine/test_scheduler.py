"""The scheduler as a state machine: plans in flight, their results, what is counted."""

from __future__ import annotations

import pytest

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import FinishReason
from pegainfer.contract.step import StepResult
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.driving import driver, finish, ids
from tests.null.engine.harness import Driver, null_config, request

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
