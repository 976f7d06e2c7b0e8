"""What the engine records of its steps, and what takes time from it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegainfer.contract.step import StepPlan
from pegainfer.contract.trace import STAGES, StepTrace
from pegainfer.engine.interference import CollectorTime, ProcessorWait
from pegainfer.engine.recorder import HANDOVER_SECONDS, StepRecorder
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import null_config, request

DEVICE = 0.01  # seconds


class Run:
    """A scheduler on the null device whose host stages and times are made up: each step takes 20 ms."""

    def __init__(self, prompts: int, tokens: int = 400, **config: Any) -> None:
        config = {"max_model_len": 512, "num_blocks": (1024,), **config}
        self.runner = NullRunner(null_config(**config))
        self.scheduler = Scheduler(self.runner.info, SchedulerConfig(pipeline_depth=1))
        self.seconds = dict.fromkeys(("schedule", "stage", "launch", "wait", "commit", "emit"), 0.0)
        self.handed: list[list[StepTrace]] = []
        self.recorder = StepRecorder(self.scheduler, self.seconds, self.handed.append)
        self.plans: list[StepPlan] = []
        self.now = 0.0
        for i in range(prompts):
            self.scheduler.add(request(f"r{i}", [1, 2, 3], max_tokens=tokens, eos=()), self.now)

    def step(self) -> None:
        plan, _ = self.scheduler.schedule(self.now)
        assert plan is not None
        self.plans.append(plan)
        result = self.runner.sample(self.runner.forward(plan)).wait()
        result = msgspec.structs.replace(result, seconds=DEVICE, cold_seconds=0.25, stage_seconds=0.125)
        for name, spent in (("schedule", 0.001), ("launch", 0.002), ("wait", 0.009), ("stage", 0.002)):
            self.seconds[name] += spent
        self.now += 0.02
        if self.recorder.on:
            self.recorder.step(plan, result, self.now)
        self.scheduler.commit(plan, result, self.now)

    @property
    def steps(self) -> list[StepTrace]:
        return [s for steps in self.handed for s in steps]


def test_a_step_is_recorded_with_its_host_stages() -> None:
    run = Run(3)
    run.recorder.switch(True, run.now)
    run.step()
    run.step()
    run.recorder.switch(False, run.now)
    first, second = run.steps
    assert (first.step, first.prefill_rows, first.prefill_tokens, first.decode_rows) == (1, 3, 9, 0)
    assert (second.step, second.prefill_rows, second.prefill_tokens, second.decode_rows) == (2, 0, 0, 3)
    assert (second.context, second.running, second.waiting) == (3 * 4, 3, 0)
    assert first.ended == pytest.approx(0.02) and second.ended == pytest.approx(0.04)
    for s in (first, second):
        assert (s.period, s.device) == (pytest.approx(0.02), DEVICE)
        assert (s.price, s.cold, s.stage) == (0.0, 0.25, 0.125)
        stages = dict(zip(STAGES, s.stages, strict=True))
        assert stages == pytest.approx(
            {"commit": 0, "emit": 0, "other": 0.008, "schedule": 0.001, "launch": 0.002, "mask": 0,
             "wait": 0.009}
        )  # fmt: skip


def test_a_rest_is_no_part_of_the_next_period() -> None:
    run = Run(1)
    run.recorder.switch(True, run.now)
    run.step()
    run.now += 100.0
    run.recorder.work(run.now)
    run.step()
    run.recorder.switch(False, run.now)
    assert [s.period for s in run.steps] == pytest.approx([0.02, 0.02])


def test_records_are_handed_over_now_and_then_and_at_the_end() -> None:
    run = Run(1)
    run.step()
    assert run.handed == []
    run.recorder.switch(True, run.now)
    for _ in range(12):
        run.step()
    run.recorder.switch(False, run.now)
    run.recorder.switch(False, run.now)
    assert [s.step for s in run.steps] == list(range(2, 14))
    assert 2 <= len(run.handed) <= 12 * 0.02 / HANDOVER_SECONDS + 2
    run.recorder.switch(True, run.now)
    run.recorder.switch(False, run.now)
    assert run.handed[-1] == []  # says that nothing more comes


def test_the_price_of_a_step_is_that_of_the_steps_before() -> None:
    run = Run(4)
    for _ in range(200):
        run.step()
    run.recorder.switch(True, run.now)
    run.step()
    run.recorder.switch(False, run.now)
    assert run.steps[0].price == pytest.approx(DEVICE, rel=0.02)
    assert run.steps[0].decode_price == run.steps[0].price


def test_preemptions_are_counted_by_step() -> None:
    run = Run(4, tokens=30, num_blocks=(12,))  # of 4 tokens
    run.recorder.switch(True, run.now)
    for _ in range(40):
        run.step()
    run.recorder.switch(False, run.now)
    total = run.scheduler.stats().preemptions
    assert total > 0
    assert total - 1 <= sum(s.preempted for s in run.steps) <= total
    assert min(s.free_blocks for s in run.steps) == 0


def test_steps_slower_than_their_price_are_counted() -> None:
    run = Run(4)
    for _ in range(200):
        run.step()
    stats = run.scheduler.stats()
    assert stats.slow_steps == 0
    # Decode steps are observed one in 8; the first 10 of these set the price.
    assert sum(stats.price_ratios) == 200 // 8 - 10
    assert stats.price_ratio_sum == pytest.approx(sum(stats.price_ratios), rel=0.02)


def test_the_collectors_time_is_counted_while_it_is_watched() -> None:
    now = iter([1.0, 1.5, 3.0, 3.25])
    watched = CollectorTime(clock=lambda: next(now))
    gc.collect()
    assert watched.seconds == 0.0
    gc.disable()
    try:
        watched.watch(True)
        gc.collect()
        gc.collect()
        watched.watch(False)
        gc.collect()
    finally:
        gc.enable()
    assert watched.seconds == 0.75


def test_waits_for_a_processor_are_added_up(tmp_path: Path) -> None:
    for thread, waited in (("10", 5_000_000), ("11", 7_000_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"123 {waited} 9\n")
    (tmp_path / "12").mkdir()  # a thread that has ended meanwhile
    processors = ProcessorWait(tmp_path)
    assert processors.seconds() == 0.0
    processors.watch(True)
    assert processors.seconds() == 0.0
    (tmp_path / "10" / "schedstat").write_text("456 8000000 12\n")
    (tmp_path / "11" / "schedstat").write_text("456 7500000 12\n")
    assert processors.seconds() == pytest.approx(0.0035)
    assert processors.seconds() == 0.0
    processors.watch(False)
    assert processors.seconds() == 0.0
