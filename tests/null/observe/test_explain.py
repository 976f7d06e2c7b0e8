"""Causes that are read from hand-made records, and records in which there is nothing to find."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegainfer.contract.event import Timings
from pegainfer.contract.observation import RequestRecord
from pegainfer.contract.trace import STAGES, StepTrace
from pegainfer.observe.explain import Cause, Explainer, step_losses
from pegainfer.observe.summary import cause_sums

DEVICE = 0.01  # seconds of an ordinary step


def step(number: int, *, stages: dict[str, float] | None = None, **changes: Any) -> StepTrace:
    """A decode step of four rows that nothing disturbed; `stages` beside the wait for the device."""
    spent = {"schedule": 0.0002, "launch": 0.0003, **(stages or {})}
    device = changes.get("device", DEVICE)
    spent["wait"] = spent.get("wait", max(0.0, device - sum(spent.values())))
    plain = StepTrace(
        step=number,
        ended=100.0 + number * DEVICE,
        period=sum(spent.values()),
        device=DEVICE,
        price=DEVICE,
        decode_price=DEVICE,
        stages=tuple(spent.get(name, 0.0) for name in STAGES),
        stage=0.0,
        cold=0.0,
        collect=0.0,
        starved=0.0,
        decode_rows=4,
        prefill_rows=0,
        prefill_tokens=0,
        context=400,
        running=4,
        waiting=0,
        loading=0,
        free_blocks=100,
        preempted=0,
    )
    return msgspec.structs.replace(plain, **changes)


def steps_with(number: int, odd: StepTrace) -> list[StepTrace]:
    """A hundred ordinary steps, one of which is another."""
    return [odd if i == number else step(i) for i in range(100)]


def record(**changes: Any) -> RequestRecord:
    """A request over all of `steps_with`'s steps that nothing held up."""
    plain = RequestRecord(
        method="POST",
        path="/v1/completions",
        began=1e9,
        clock=99.98,
        seconds=1.03,
        id="r",
        gap=DEVICE,
        timings=Timings(arrival=99.98, admitted=99.99, ready=99.99, scheduled=99.995, first_token=100.02,
                        finished=101.0),
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def test_nothing_is_named_where_nothing_was_slow() -> None:
    steps = [step(i, price=DEVICE * (1 + i % 3 / 10)) for i in range(100)]
    assert step_losses(steps) == []
    assert cause_sums(steps, [record()] * 3) == []


@pytest.mark.parametrize(
    ("changes", "stages", "cause", "lost"),
    [
        ({"device": 0.3}, {}, Cause.DEVICE, 0.29),
        ({"device": 0.3, "starved": 0.2}, {}, Cause.CONTENTION, 0.29),
        ({}, {"schedule": 0.2}, Cause.HOST, 0.19),
        ({}, {"mask": 0.2}, Cause.MASK, 0.19),
        ({"collect": 0.15}, {"emit": 0.2}, Cause.COLLECT, 0.19),
        ({"cold": 0.15}, {"launch": 0.2}, Cause.COLD, 0.19),
        ({"starved": 0.15}, {"other": 0.2}, Cause.CONTENTION, 0.19),
        ({"device": 0.3, "price": 0.3, "prefill_tokens": 900, "prefill_rows": 1}, {}, Cause.PREFILL, 0.29),
        ({"decode_rows": 0, "loading": 1, "device": 0.0, "price": 0.0}, {"wait": 0.2}, Cause.TIER, 0.2),
    ],
)
def test_one_odd_step(changes: dict[str, Any], stages: dict[str, float], cause: Cause, lost: float) -> None:
    steps = steps_with(50, step(50, stages=stages, **changes))
    (finding,) = Explainer(steps).request(record())
    assert finding.cause is cause
    assert finding.seconds == pytest.approx(lost, abs=0.005)
    assert "step 50" in finding.sentence


def test_a_graph_made_for_the_next_step_is_blamed() -> None:
    steps = steps_with(50, step(50, stages={"launch": 0.2}))
    steps[51] = step(51, cold=0.15)
    (finding,) = Explainer(steps).request(record())
    assert finding.cause is Cause.COLD and "step 51" in finding.sentence


def test_a_prompts_own_step_is_no_loss_to_it() -> None:
    odd = step(1, device=0.3, price=0.3, prefill_tokens=900, prefill_rows=1)
    steps = steps_with(1, odd)
    assert odd.ended < 100.02
    assert Explainer(steps).request(record()) == []


def test_steps_of_others_are_not_blamed() -> None:
    timings = Timings(admitted=99.99, ready=99.99, scheduled=100.6, first_token=100.62, finished=101.0)
    steps = steps_with(50, step(50, device=0.3))
    found = Explainer(steps).request(record(timings=timings, clock=100.58, seconds=0.43))
    assert Cause.DEVICE not in {f.cause for f in found}


def test_a_step_without_a_price_is_compared_with_its_like() -> None:
    steps = [step(i, price=0.0, decode_price=0.0) for i in range(100)]
    steps[50] = step(50, price=0.0, decode_price=0.0, device=0.3)
    (loss,) = step_losses(steps)
    assert loss.step.step == 50 and loss.cause is Cause.DEVICE
    assert loss.seconds == pytest.approx(0.29)
    assert step_losses([steps[50]]) == []  # nothing to compare it with


@pytest.mark.parametrize(
    ("stage", "cause"),
    [
        ("body", Cause.UPLOAD),
        ("template", Cause.TEMPLATE),
        ("grammar", Cause.GRAMMAR),
        ("tokenize", Cause.TOKENIZE),
        ("detokenize", Cause.DETOKENIZE),
        ("socket", Cause.CLIENT),
    ],
)
def test_the_fronts_stages(stage: str, cause: Cause) -> None:
    steps = [step(i) for i in range(100)]
    (finding,) = Explainer(steps).request(record(stages={stage: 0.3}))
    assert finding == (cause, 0.3, finding.sentence) and "300.0 ms" in finding.sentence
    assert Explainer(steps).request(record(stages={stage: 0.04})) == []  # below what counts
    assert Explainer(steps).request(record(stages={stage: 0.3}, seconds=4.0)) == []  # 7.5% of its time
    assert Explainer(steps).request(record(stages={stage: 1.2}, seconds=40.0)) != []  # long by itself


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, Cause.QUEUE),
        ({"free_blocks": 0}, Cause.POOL),
        ({"preempted": 1}, Cause.POOL),
        ({"loading": 2}, Cause.TIER),
    ],
)
def test_the_wait_for_the_first_step(changes: dict[str, Any], cause: Cause) -> None:
    steps = [step(i, **(changes if i == 20 else {})) for i in range(100)]
    timings = Timings(admitted=100.01, ready=100.01, scheduled=100.5, first_token=100.52, finished=101.0)
    (finding,) = Explainer(steps).request(record(timings=timings, clock=100.0, seconds=1.0))
    assert finding.cause is cause
    assert finding.seconds == pytest.approx(0.49)


@pytest.mark.parametrize(("preemptions", "cause"), [(0, Cause.FRONT), (1, Cause.PREEMPTION)])
def test_a_gap_between_tokens_while_the_engine_made_steps(preemptions: int, cause: Cause) -> None:
    timings = msgspec.structs.replace(record().timings, preemptions=preemptions)
    (finding,) = Explainer([step(i) for i in range(100)]).request(record(timings=timings, gap=0.4))
    assert finding.cause is cause
    assert finding.seconds == pytest.approx(0.4 - 2 * DEVICE)


def test_causes_add_up_over_requests() -> None:
    steps = steps_with(50, step(50, device=0.3))
    slow = record(id="worst", stages={"socket": 0.5})
    first, second = cause_sums(steps, [record(), slow])
    assert (first.cause, first.requests, first.worst.id) == (Cause.DEVICE, 2, "r")
    assert first.seconds == pytest.approx(2 * 0.29)
    assert first.share == pytest.approx(2 * 0.29 / (2 * 1.03))
    assert (second.cause, second.requests, second.worst.id) == (Cause.CLIENT, 1, "worst")


def test_a_trace_without_steps_lost_nothing() -> None:
    assert step_losses([]) == []
