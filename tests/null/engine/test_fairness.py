"""Tenants: who is served next, and that nobody is harmed by another's flood."""

from __future__ import annotations

import pytest

from pegainfer.contract.event import FinishReason
from pegainfer.engine.fairness import DECODE_WEIGHT, MAX_ABSENT, Tenants
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.harness import Driver, null_config, request


def driver(slots: int = 1, **config: float) -> Driver:
    null = null_config(max_slots=slots, virtual=True, step_seconds=0.1)
    return Driver(null, SchedulerConfig(aging_seconds=config.get("aging", 1e6)), tick=0.0)


def order(d: Driver) -> list[str]:
    """Requests in the order of their first steps."""
    ends = [a.finish for a in d.answers.values()]
    assert all(e is not None and e.timings is not None for e in ends)
    return [e.request_id for e in sorted(ends, key=lambda e: e.timings.scheduled)]  # type: ignore[union-attr]


def flood(d: Driver, tenant: str, count: int, *, prompt: int = 8, priority: int = 0) -> None:
    for i in range(count):
        d.add(
            request(
                f"{tenant}{i}",
                [i % 20, len(tenant)] + [i // 20] * (prompt - 2),
                tenant=tenant,
                max_tokens=4,
                eos=(),
                priority=priority,
            )
        )


def test_a_newcomer_goes_before_anothers_backlog() -> None:
    d = driver()
    flood(d, "a", 20)
    for _ in range(40):
        d.step()
    before = len([a for a in d.answers.values() if a.finish])
    assert 2 <= before <= 10
    flood(d, "b", 2)
    d.run()
    d.judge()
    places = order(d)
    assert max(places.index("b0"), places.index("b1")) <= before + 5


def test_two_backlogs_take_turns_by_what_they_cost() -> None:
    d = driver()
    flood(d, "a", 30, prompt=8)
    flood(d, "b", 30, prompt=8)
    d.run()
    first = order(d)[:20]
    assert abs(sum(name.startswith("a") for name in first) - 10) <= 2


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    d = driver()
    flood(d, "a", 12)
    d.run()
    assert order(d) == [f"a{i}" for i in range(12)]


def test_a_tenant_of_long_prompts_gets_fewer_of_them() -> None:
    d = driver()
    flood(d, "long", 20, prompt=48)
    flood(d, "short", 20, prompt=8)
    d.run()
    first = order(d)[:16]
    # Service a request: 48 or 8 prompt tokens, and 4 of DECODE_WEIGHT, the last of which ends it.
    long, short = 48 + 4 * DECODE_WEIGHT, 8 + 4 * DECODE_WEIGHT
    expected = 16 * short / (long + short)
    assert abs(sum(name.startswith("long") for name in first) - expected) <= 2


def test_priorities_hold_among_tenants_for_as_much_service_as_aging_says() -> None:
    d = driver(aging=10.0)  # a level is what 100 steps give
    flood(d, "b", 30)
    flood(d, "a", 30, priority=-1)
    d.run()
    places = [name[0] for name in order(d)]
    assert "b" not in places[1:15]  # b0 may run already when the first of the others is seen
    assert places.index("b", 1) < places[::-1].index("a") + 30  # and nobody waits for all of them


def test_a_running_sequence_is_not_displaced_by_the_backlog_that_it_overtook() -> None:
    d = driver(slots=2)
    flood(d, "a", 10)
    for _ in range(12):
        d.step()
    flood(d, "b", 3)
    d.run()
    d.judge()
    assert d.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("blocks", [16, 20])
def test_pressure_among_tenants_ends_well(blocks: int) -> None:
    null = null_config(max_slots=4, num_blocks=(blocks,), virtual=True, step_seconds=0.1)
    d = Driver(null, SchedulerConfig(aging_seconds=30.0), tick=0.0)
    for i in range(16):
        d.add(request(f"r{i}", [i] * 24, tenant="abc"[i % 3], max_tokens=30, eos=()))
    d.run()
    d.judge()
    assert d.scheduler.stats().preemptions > 0
    assert {a.finish.finish for a in d.answers.values() if a.finish} == {FinishReason.LENGTH}


def test_accounts_start_at_the_least_and_excess_is_remembered() -> None:
    tenants = Tenants(30.0)
    a = tenants.enter("a")
    assert not tenants.contended
    a.service += 100
    b = tenants.enter("b")
    assert tenants.contended and b.service == 100
    b.service += 50
    tenants.leave(b)
    again = tenants.enter("b")
    assert again.service == 150
    tenants.leave(again)
    a.service += 500
    assert tenants.enter("b").service == 600


def test_absent_tenants_are_forgotten_beyond_a_bound() -> None:
    tenants = Tenants(30.0)
    here = tenants.enter("here")
    for i in range(MAX_ABSENT + 1):
        tenant = tenants.enter(f"t{i}")
        tenant.service += 10
        tenants.leave(tenant)
    assert tenants.enter("t0").service == here.service
    assert tenants.enter("t1").service == here.service + 10
