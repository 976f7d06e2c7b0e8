"""Ends from outside: cancels, deadlines, too long a wait."""

from __future__ import annotations

import pytest

from pegainfer.contract.event import FinishReason
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.driving import driver, finish, ids
from tests.null.engine.harness import Driver, null_config, request


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
