"""Arrival times: reproducible, of the right rate and shape."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pegainfer.bench.config import LoadConfig
from pegainfer.bench.schedule import arrivals, rate_at
from pegainfer.contract.errors import ConfigError


def gaps(times: list[float]) -> np.ndarray:
    return np.diff([0.0, *times])


def test_without_a_rate_all_arrive_at_once() -> None:
    assert arrivals(LoadConfig(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_seed_makes_the_schedule(burstiness: float) -> None:
    config = LoadConfig(request_rate=10.0, burstiness=burstiness, seed=7)
    times = arrivals(config, 500)
    assert times == arrivals(config, 500)
    assert times != arrivals(LoadConfig(request_rate=10.0, burstiness=burstiness, seed=8), 500)
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times[-1] == pytest.approx(50.0)  # 500 requests at 10 a second, whatever the seed
    # Gaps of a gamma distribution vary by 1/√shape of their mean.
    assert gaps(times).std() / gaps(times).mean() == pytest.approx(burstiness**-0.5, rel=0.15)


def test_infinite_burstiness_is_a_metronome() -> None:
    times = arrivals(LoadConfig(request_rate=4.0, burstiness=math.inf), 8)
    assert times == pytest.approx([0.25 * i for i in range(1, 9)])


def test_ramps() -> None:
    linear = LoadConfig(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=9)
    assert [rate_at(linear, i, 5) for i in range(5)] == pytest.approx([1, 3, 5, 7, 9])
    steep = LoadConfig(ramp_up_strategy="exponential", ramp_up_start_rps=1, ramp_up_end_rps=16)
    assert [rate_at(steep, i, 5) for i in range(5)] == pytest.approx([1, 2, 4, 8, 16])
    even = LoadConfig(ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=4, burstiness=math.inf)
    assert arrivals(even, 4) == pytest.approx([1, 1 + 1 / 2, 1 + 1 / 2 + 1 / 3, 1 + 1 / 2 + 1 / 3 + 1 / 4])


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"request_rate": 0.0},
        {"burstiness": 0.0},
        {"max_concurrency": 0},
        {"ramp_up_strategy": "linear"},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 0, "ramp_up_end_rps": 4},
        {"ramp_up_start_rps": 1},
        {
            "ramp_up_strategy": "linear",
            "ramp_up_start_rps": 1,
            "ramp_up_end_rps": 2,
            "request_rate": 5.0,
        },
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        LoadConfig(**wrong)  # type: ignore[arg-type]
