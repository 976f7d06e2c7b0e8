"""When requests arrive: a renewal process with gamma-distributed gaps, whose rate may ramp."""

from __future__ import annotations

import math

import numpy as np

from pegainfer.bench.config import LoadConfig


def arrivals(config: LoadConfig, count: int) -> list[float]:
    """Seconds after the start at which each of `count` requests arrives; ascending, the same for a seed.

    Without a ramp the times are scaled so that the last one is count / rate: two seeds then load a server
    equally, and only their bursts differ.
    """
    rates = [rate_at(config, i, count) for i in range(count)]
    if math.isinf(rates[0]):
        return [0.0] * count
    means = 1.0 / np.array(rates)
    if math.isinf(config.burstiness):
        gaps = means
    else:
        rng = np.random.default_rng(config.seed)
        gaps = rng.gamma(config.burstiness, means / config.burstiness)
    times = np.cumsum(gaps)
    if config.ramp_up_strategy is None:
        times *= (count / config.request_rate) / times[-1]
    return [float(t) for t in times]


def rate_at(config: LoadConfig, index: int, count: int) -> float:
    """Requests a second wanted when request `index` of `count` arrives."""
    if config.ramp_up_strategy is None:
        return config.request_rate
    first, last = config.ramp_up_start_rps, config.ramp_up_end_rps
    assert first is not None and last is not None
    progress = index / max(count - 1, 1)
    if config.ramp_up_strategy == "linear":
        return first + (last - first) * progress
    return float(first * (last / first) ** progress)
