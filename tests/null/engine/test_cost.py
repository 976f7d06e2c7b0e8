"""The price of a step, learnt from made-up times; and the chunks that the latency target leaves."""

from __future__ import annotations

import itertools
import random

import pytest

from pegainfer.engine.cost import StepCost, StepLoad, prefill_pairs
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.harness import Driver, null_config, request

# Seconds: a step, a prompt token, a decode row, a position that a decode row reads, a pair.
TRUE = (5e-3, 1e-4, 2e-5, 1e-8, 2e-9)


def seconds_of(load: StepLoad) -> float:
    return sum(w * x for w, x in zip(TRUE, (1.0, *load), strict=True))


def random_load(r: random.Random, *, prefill: bool) -> StepLoad:
    rows = r.randint(0 if prefill else 1, 200)
    count, start = (r.randint(1, 2000), r.randint(0, 8000)) if prefill else (0, 0)
    return StepLoad(count, rows, rows * r.randint(10, 4000), prefill_pairs(start, count))


def learnt(noise: float = 0.0, steps: int = 200) -> StepCost:
    r = random.Random(1)
    cost = StepCost()
    for i in range(steps):
        load = random_load(r, prefill=i % 3 == 0)
        cost.observe(load, seconds_of(load) * (1 + r.uniform(-noise, noise)))
    return cost


def test_pairs_of_a_chunk_are_counted_one_by_one() -> None:
    assert prefill_pairs(7, 3) == 8 + 9 + 10
    assert prefill_pairs(0, 1) == 1


@pytest.mark.parametrize(("noise", "error"), [(0.0, 1e-3), (0.1, 0.1)])
def test_the_fit_finds_what_the_steps_cost(noise: float, error: float) -> None:
    cost = learnt(noise)
    assert cost.decodes(64, 64_000) == pytest.approx(5e-3 + 64 * 2e-5 + 64_000 * 1e-8, rel=error)
    expected = 512 * 1e-4 + prefill_pairs(1000, 512) * 2e-9
    assert cost.prefill(1000, 512) == pytest.approx(expected, rel=error)


@pytest.mark.parametrize("start", [0, 1000, 100_000])
@pytest.mark.parametrize("seconds", [0.002, 0.05, 3.0])
def test_the_longest_chunk_within_a_time(start: int, seconds: float) -> None:
    cost = learnt()
    count = cost.tokens_within(seconds, start)
    assert count is not None
    assert cost.prefill(start, count) <= seconds * (1 + 1e-9) < cost.prefill(start, count + 1)


def test_no_weight_is_negative() -> None:
    """Steps that get quicker the more they do would make a plain fit promise time for nothing."""
    cost = StepCost()
    for count in range(1, 40):
        cost.observe(StepLoad(count, 4, 4000, prefill_pairs(0, count)), 1.0 / count)
    assert cost.prefill(0, 100) >= 0.0
    assert cost.decodes(1, 0) >= 0.0


def test_nothing_is_known_before_a_step_was_timed() -> None:
    cost = StepCost()
    cost.observe(StepLoad(100, 0, 0, 5050), 0.0)
    assert cost.tokens_within(0.01, 0) is None
    assert cost.decodes(8, 1000) == cost.prefill(0, 100) == 0.0


def test_decoding_alone_does_not_wash_out_what_a_prefill_costs() -> None:
    cost = learnt()
    load = StepLoad(0, 64, 64_000, 0)
    for _ in range(10_000):
        cost.observe(load, seconds_of(load))
    assert cost.prefill(0, 512) == pytest.approx(512 * 1e-4 + prefill_pairs(0, 512) * 2e-9, rel=0.05)


def test_a_device_that_slows_down_is_learnt_anew() -> None:
    cost = learnt()
    r = random.Random(2)
    for i in range(450):
        load = random_load(r, prefill=i % 3 == 0)
        cost.observe(load, 3 * seconds_of(load))
    assert cost.prefill(0, 512) == pytest.approx(3 * (512 * 1e-4 + prefill_pairs(0, 512) * 2e-9), rel=0.05)


# In the scheduler: 10 ms a step and 1 ms a token, decode rows included

DEVICE = {"num_blocks": (1024,), "max_slots": 8, "max_tokens": 400, "max_model_len": 1024}
LATENCY = {"step_seconds": 0.010, "token_seconds": 0.001, "virtual": True}


def mixed_chunks(target_ms: float, prompts: int = 1, decoders: int = 4) -> list[list[int]]:
    """Chunks of long prompts in each step beside sequences that decode, after a first prompt was timed."""
    d = Driver(
        null_config(**DEVICE, **LATENCY), SchedulerConfig(pipeline_depth=1, target_itl_ms=target_ms), tick=0.0
    )
    for i in range(decoders):
        d.add(request(f"d{i}", [i] * 40, max_tokens=200, eos=()))
    for _ in range(3 + 16):
        d.step()
    for i in range(prompts):
        d.add(request(f"p{i}", [10 + i] * 300, max_tokens=1, eos=()))
    first = len(d.plans)
    d.run()
    d.judge()
    return [
        [row.count for row in plan.rows if row.count > 1]
        for plan in d.plans[first:]
        if any(row.count > 1 for row in plan.rows)
    ]


def test_a_mixed_step_takes_what_the_target_leaves() -> None:
    # 10 ms for the step and 4 for its decode rows leave 26 tokens of 1 ms.
    chunks = mixed_chunks(40.0)
    assert {sum(c) for c in chunks[:-1]} <= {25, 26}  # the fit is exact to rounding


def test_a_target_below_the_decoding_itself_still_lets_prompts_come_on() -> None:
    # A quarter of 12 ms is less than one block of 4 tokens, which is the least.
    chunks = mixed_chunks(12.0)
    assert {sum(c) for c in chunks[:-1]} == {4}


def test_without_a_target_a_prompt_takes_all_that_the_step_has() -> None:
    assert mixed_chunks(0.0) == [[300]]


def test_several_prompts_share_what_is_left() -> None:
    chunks = mixed_chunks(40.0, prompts=3)
    assert max(sum(c) for c in chunks) <= 26


def test_a_step_without_decode_rows_is_not_bounded() -> None:
    assert mixed_chunks(40.0, decoders=0)[0] == [300]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_gap_between_tokens_exceeds_the_target(depth: int) -> None:
    config = SchedulerConfig(pipeline_depth=depth, target_itl_ms=60.0)
    d = Driver(null_config(**DEVICE, **LATENCY), config, tick=0.0)
    d.add(request("warm", [1] * 64, max_tokens=4, eos=()))
    d.run()
    d.add(request("chat", [2] * 8, max_tokens=150, eos=()))
    times: list[float] = []
    added = 0
    while d.scheduler.has_work():
        if len(times) > 10 and added < 3:
            d.add(request(f"doc{added}", [3 + added] * 700, max_tokens=2, eos=()))
            added += 1
        before = len(d.answers["chat", 0].tokens)
        d.step()
        if len(d.answers["chat", 0].tokens) > before:
            times.append(d.now)
    d.judge()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= 0.060 + 1e-6
    assert max(gaps) > 0.050  # and the target is used
