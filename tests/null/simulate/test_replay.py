"""The virtual clock: when tokens reach clients, what concurrency and arrivals do, and who is refused."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import msgspec
import pytest

from pegainfer.contract.errors import ConfigError, InvariantError, UnsupportedError
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.contract.step import KVSpec, NewSlot, PageGroup, Row, RunnerInfo, StepPlan
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.measure.prices import StepWork
from pegainfer.simulate.host import HostPrices
from pegainfer.simulate.replay import Arrival, Outcome, Replay, Usage
from pegainfer.simulate.runner import SimulatedRunner

FREE = HostPrices(repeat=0.0, change=0.0, change_row=0.0, step=0.0, commit=0.0, commit_row=0.0, request=0.0)
STEP = 0.010  # seconds


def info(blocks: int = 1024, slots: int = 16) -> RunnerInfo:
    return RunnerInfo(
        kv=KVSpec((PageGroup(name="kv", block_size=16, bytes_per_block=16),)),
        num_blocks=(blocks,),
        max_slots=slots,
        max_tokens=512,
        max_model_len=4096,
        vocab_size=32_000,
    )


def arrival(number: int, prompt: int, answer: int, at: float = 0.0, first: int | None = None) -> Arrival:
    """A prompt of its own, or one that begins with `first` throughout."""
    ids = [number if first is None else first] * prompt
    sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    return Arrival(at, GenerateRequest(id=str(number), prompt=pack_tokens(ids), sampling=sampling))


def replay(
    arrivals: list[Arrival],
    *,
    host: HostPrices = FREE,
    concurrency: int | None = None,
    bounds: RunnerInfo | None = None,
    config: SchedulerConfig | None = None,
) -> tuple[list[Outcome], Usage, SimulatedRunner]:
    bounds = bounds or info()
    runner = SimulatedRunner(bounds, lambda work: STEP)
    outcomes, usage = Replay(Scheduler(bounds, config), runner, host, arrivals, concurrency).run()
    return outcomes, usage, runner


def test_tokens_come_a_step_apart_and_half_a_request_later() -> None:
    host = dataclasses.replace(FREE, request=0.002)
    (outcome,), usage, _ = replay([arrival(0, 5, 3)], host=host)
    assert outcome.tokens == pytest.approx([0.012, 0.022, 0.032])
    assert outcome.counts == [1, 1, 1]
    assert outcome.end == pytest.approx(0.032)
    # A plan is in flight when the last token comes to light: its row is wasted.
    assert usage.steps in (3, 4)


def test_a_long_prompt_takes_the_steps_that_its_chunks_need() -> None:
    (outcome,), _, runner = replay([arrival(0, 1200, 1)])
    assert outcome.tokens == pytest.approx([3 * STEP])
    assert list(runner.works)[:3] == [
        StepWork(0, 0, ((0, 512),), 0),
        StepWork(0, 0, ((512, 512),), 0),
        StepWork(0, 0, ((1024, 176),), 1),
    ]


def test_rows_that_go_on_read_one_token_more_each_step() -> None:
    _, _, runner = replay([arrival(0, 100, 5), arrival(1, 50, 5)])
    decodes = [work for work in runner.works if not work.chunks]
    assert decodes[:3] == [StepWork(2, 152, (), 2), StepWork(2, 154, (), 2), StepWork(2, 156, (), 2)]


def test_the_next_client_sends_when_the_one_before_has_its_answer() -> None:
    (first, second), _, _ = replay([arrival(0, 5, 2), arrival(1, 5, 2)], concurrency=1)
    assert first.sent == 0.0
    assert second.sent == pytest.approx(first.end)
    assert second.wanted == 0.0
    assert second.tokens[0] >= second.sent + STEP


def test_requests_come_when_they_arrive_and_the_device_rests_between() -> None:
    (first, second), usage, _ = replay([arrival(0, 5, 1), arrival(1, 5, 1, at=1.0)])
    assert first.end == pytest.approx(STEP)
    assert second.tokens == pytest.approx([1.0 + STEP])
    assert usage.seconds == pytest.approx(1.0 + STEP)
    assert usage.waits == 0.0


def test_a_slow_host_keeps_the_device_waiting_and_that_is_counted() -> None:
    slow = dataclasses.replace(FREE, repeat=0.015, change=0.015)
    (outcome,), usage, _ = replay([arrival(0, 5, 20)], host=slow)
    # Each step costs the host 15 ms and the device 10, which then waits for 5; none follows the last one.
    gaps = [b - a for a, b in pairwise(outcome.tokens[2:-1])]
    assert gaps == pytest.approx([0.015] * len(gaps))
    assert usage.waits == pytest.approx(0.005 * (usage.steps - 1), rel=0.01)


def test_a_cached_prefix_is_not_computed_again() -> None:
    cold, warm = replay([arrival(0, 400, 1, first=7), arrival(1, 400, 1, first=7)], concurrency=1)[0]
    assert cold.cached == 0
    assert warm.cached == 384  # 24 of the 25 blocks: the last token is always computed


def test_a_full_queue_refuses_and_frees_the_place() -> None:
    config = SchedulerConfig(max_waiting_requests=2)
    outcomes, _, _ = replay([arrival(i, 5, 2) for i in range(5)], config=config)
    refused = [o for o in outcomes if o.error]
    assert len(refused) == 3
    assert all("waiting" in o.error or "queue" in o.error for o in refused)
    assert sum(len(o.tokens) for o in outcomes) == 4


def test_too_few_blocks_preempt_and_everyone_still_gets_all_tokens() -> None:
    outcomes, _, _ = replay([arrival(i, 60, 100) for i in range(8)], bounds=info(blocks=24))
    assert [sum(o.counts) for o in outcomes] == [100] * 8


def test_two_requests_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="same id"):
        replay([arrival(0, 5, 1), arrival(0, 5, 1)])


def test_a_row_of_an_empty_slot_is_a_fault() -> None:
    runner = SimulatedRunner(info(), lambda work: STEP)
    new = NewSlot(slot=1, seq=1, tokens=pack_tokens([1, 2]), num_prompt=2, sampling=SamplingParams(), seed=0)
    runner.forward(StepPlan(step=1, news=(new,), rows=(Row(1, 0, 2, True),)))
    with pytest.raises(InvariantError, match="slot 2"):
        runner.forward(StepPlan(step=2, rows=(Row(2, 0, 1, True),)))


def test_speculation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="speculation"):
        SimulatedRunner(msgspec.structs.replace(info(), max_commit=4), lambda work: STEP)
