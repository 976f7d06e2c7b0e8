"""Memory far too small for what is asked: everybody is served, in turn, with the same tokens."""

from __future__ import annotations

import functools
import random

import pytest

from pegainfer.contract.event import FinishReason, Timings
from pegainfer.contract.request import GenerateRequest
from pegainfer.engine.scheduler import SchedulerConfig
from pegainfer.null.config import NullConfig
from pegainfer.null.model import NullModel
from tests.null.engine.harness import Driver, null_config, request

REQUESTS, TOKENS, POOL = 200, 2_000, 10_000
MOST_SHARES = 1.5  # found: 1.02 with one tenant, 1.15 with four
MODEL = NullModel(vocab_size=32, letters=tuple(range(20)), eos_id=30, eos_every=0)


def device(pool: int, slots: int) -> NullConfig:
    """16 tokens a block; 5 ms a step and 50 µs a token."""
    return NullConfig(
        model=MODEL,
        num_blocks=(pool // 16,),
        max_slots=slots,
        max_tokens=512 + slots,
        max_model_len=4096,
        virtual=True,
        step_seconds=5e-3,
        token_seconds=5e-5,
    )


def requests(tenants: int) -> list[GenerateRequest]:
    """Prompt and answer make 2,000 tokens together; no prefix is shared."""
    r = random.Random(5)
    out = []
    for i in range(REQUESTS):
        answer = r.choice([50, 50, 50, 500])
        prompt = [r.randrange(20) for _ in range(TOKENS - answer)]
        out.append(request(f"r{i}", prompt, seed=i, max_tokens=answer, eos=(), tenant=f"t{i % tenants}"))
    return out


def completions(pool: int, slots: int, wanted: list[GenerateRequest]) -> tuple[Driver, list[Timings]]:
    """All requests at once, at second 0; their times in the order of arrival."""
    d = Driver(device(pool, slots), SchedulerConfig(), tick=0.0, check=False)
    d.now = 0.0
    for req in wanted:
        d.add(req)
    while d.scheduler.has_work():
        d.step()
        idle = not d.running and not d.pending
        assert not (idle and d.waiting), "requests wait, none runs and nothing is under way"
    ends = [d.answers[req.id, 0].finish for req in wanted]
    assert {e.finish for e in ends if e} == {FinishReason.LENGTH}
    return d, [e.timings for e in ends if e and e.timings]


@functools.cache
def calm_run() -> tuple[Driver, list[Timings]]:
    """What is fair: five at a time, which the pool holds, without any pressure."""
    return completions(REQUESTS * 2048, POOL // TOKENS, requests(tenants=1))


@pytest.mark.parametrize("tenants", [1, 4])
def test_two_hundred_requests_in_a_pool_for_five(tenants: int) -> None:
    wanted = requests(tenants)
    calm, calm_times = calm_run()
    pressed, times = completions(POOL, 64, wanted)
    assert calm.scheduler.stats().preemptions == 0
    assert pressed.scheduler.stats().preemptions > 0
    for req in wanted:
        assert pressed.answers[req.id, 0].tokens == calm.answers[req.id, 0].tokens
    calm_total = max(t.finished for t in calm_times)
    for place, (own, time) in enumerate(zip(calm_times, times, strict=True)):
        # Waited in the queue, or after a preemption; the first five need not wait for a share.
        waited = time.finished - (own.finished - own.scheduled)
        share = calm_total * max(place + 1, POOL // TOKENS) / REQUESTS
        assert waited <= MOST_SHARES * share, f"request {place} waited too long"
    # Recomputing what was preempted costs little of the whole.
    assert max(t.finished for t in times) <= 1.25 * calm_total
    pressed.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [8, 9, 11])
@pytest.mark.parametrize("watermark", [0.0, 0.5, 0.99])
def test_a_pool_for_one_serves_many_one_by_one(blocks: int, watermark: float, depth: int) -> None:
    """The watermark, a prefix that fills the pool, and forks: nothing may leave all of them waiting."""
    config = SchedulerConfig(pipeline_depth=depth, watermark=watermark)
    d = Driver(null_config(num_blocks=(blocks,), max_model_len=32), config)
    for i in range(12):
        prompt = [7] * 20 if i % 3 else [i] * 24
        d.add(request(f"r{i}", prompt, n=1 + i % 2, max_tokens=7, eos=(), tenant="ab"[i % 2]))
        d.step()
    d.run()
    d.judge()
