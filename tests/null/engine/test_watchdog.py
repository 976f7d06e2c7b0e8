"""An engine that stands still is reported once, with its plan and its threads."""

from __future__ import annotations

import threading

from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, StepPlan
from pegainfer.engine.watchdog import MAX_PLAN_CHARS, Progress, Watchdog, describe_plan, watching
from tests.null.engine.harness import request
from tests.support.null_engine import null_engine

NEW = NewSlot(
    slot=3, seq=1, tokens=pack_tokens([11, 12]), num_prompt=2, sampling=SamplingParams(top_k=77), seed=5
)
PLAN = StepPlan(step=9, news=(NEW,), rows=(Row(3, 0, 2, True),))


def test_a_stall_is_reported_once_and_its_end_too() -> None:
    at = Progress(1, False, PLAN)
    said: list[str] = []
    dog = Watchdog(lambda: at, 10.0, said.append)
    for now in (0.0, 9.9):
        dog.look(now)
    assert said == []
    for now in (10.0, 20.0, 30.0):
        dog.look(now)
    assert len(said) == 1
    assert "no step for 10.0 s; its last plan: step 9, 1 rows, 2 tokens" in said[0]
    assert "test_a_stall_is_reported_once_and_its_end_too" in said[0]  # this thread's stack
    at = Progress(2, False, PLAN)
    dog.look(31.0)
    assert said[1:] == ["the engine moves again after 31.0 s"]
    dog.look(41.0)
    assert len(said) == 3


def test_a_moving_or_resting_engine_is_left_alone() -> None:
    at = Progress(0, True, None)
    said: list[str] = []
    dog = Watchdog(lambda: at, 10.0, said.append)
    for now in (0.0, 100.0, 200.0):
        dog.look(now)
    for turns in range(1, 20):
        at = Progress(turns, False, PLAN)
        dog.look(200.0 + 9.0 * turns)
    assert said == []


def test_a_plan_is_told_without_its_prompts() -> None:
    text = describe_plan(PLAN)
    assert '"top_k":77' in text and '"tokens":""' in text
    assert describe_plan(None) == "none yet"
    many = StepPlan(step=1, rows=tuple(Row(i, 10_000, 1, True) for i in range(1000)))
    assert len(describe_plan(many)) < MAX_PLAN_CHARS + 100


def test_the_engine_tells_where_it_is() -> None:
    with null_engine() as engine:
        done = threading.Event()

        def sink(event: TokenEvent) -> None:
            if event.finish is not None:
                done.set()

        engine.submit(request("r", [1, 2, 3], max_tokens=5, eos=()), sink)
        assert done.wait(60)
        at = engine._loop.progress()
    assert at.turns >= 5
    assert at.plan is not None and len(at.plan.rows) == 1


def test_the_thread_looks_until_the_context_ends() -> None:
    looked = threading.Event()

    def progress() -> Progress:
        looked.set()
        return Progress(0, True, None)

    with watching(progress, 0.02):
        assert looked.wait(60)
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
    with watching(progress, 0.0):
        assert "watchdog" not in [thread.name for thread in threading.enumerate()]
