"""When a prefix is loaded and when it is computed."""

from __future__ import annotations

import pytest

from pegainfer.engine.restore_cost import PROBE, RestoreCost

HOST, DISK = 1, 2


def learnt(*loads: tuple[dict[int, int], float]) -> RestoreCost:
    cost = RestoreCost(2)
    for nbytes, seconds in loads:
        cost.observe(nbytes, seconds)
    return cost


def test_what_is_unknown_is_worth_it() -> None:
    cost = learnt()
    assert cost.seconds({HOST: 100}) == 0.0
    assert cost.is_worth({HOST: 1 << 40}, 1e-9)
    assert learnt(({HOST: 100}, 5.0)).is_worth({HOST: 100}, 0.0)  # no price of computing yet


def test_latency_and_bandwidth_are_told_apart_by_loads_of_several_sizes() -> None:
    cost = learnt(*[({HOST: n}, 0.01 + n / 1e9) for n in (10**6, 10**7, 10**8, 3 * 10**7)])
    for n in (10**5, 10**9):
        assert cost.seconds({HOST: n}) == pytest.approx(0.01 + n / 1e9, rel=1e-6)


def test_loads_of_one_size_give_a_bandwidth() -> None:
    cost = learnt(*[({DISK: 10**6}, 0.5)] * 3)
    assert cost.seconds({DISK: 2 * 10**6}) == pytest.approx(1.0)
    assert cost.seconds({HOST: 10**6}) == 0.0


def test_a_load_from_two_tiers_counts_for_the_slower_one() -> None:
    cost = learnt(({HOST: 500, DISK: 500}, 2.0))
    assert cost.seconds({DISK: 1000}) == pytest.approx(2.0)
    assert cost.seconds({HOST: 1000}) == 0.0


def test_no_size_has_a_negative_price() -> None:
    cost = learnt(({HOST: 100}, 3.0), ({HOST: 1000}, 1.0))
    assert cost.seconds({HOST: 1}) > 0 and cost.seconds({HOST: 10**9}) > 0
    cost = learnt(({HOST: 1000}, 0.1), ({HOST: 2000}, 1.0))
    assert cost.seconds({HOST: 1}) > 0


def test_a_slow_tier_is_tried_again_now_and_then() -> None:
    cost = learnt(*[({HOST: 1000}, 2.0)] * 5)
    assert cost.is_worth({HOST: 1000}, 2.5)
    answers = [cost.is_worth({HOST: 1000}, 1.0) for _ in range(2 * PROBE)]
    assert answers.count(True) == 2
    for _ in range(60):
        cost.observe({HOST: 1000}, 0.1)
    assert cost.is_worth({HOST: 1000}, 1.0)
