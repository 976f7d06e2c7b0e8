"""LLM.get_metrics: the engine's counters in the form that vLLM's users know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegainfer.contract.event import EngineStats
from pegainfer.frontend.http.observation.metrics import ENGINE_COUNTERS

PREFIX = "pegainfer:"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure by its name in /metrics, without Prometheus' ending `_total`."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Counter(Metric):
    """Grows from the engine's start on."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Gauge(Metric):
    """A state of the moment."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Histogram(Metric):
    """`buckets`: how many values were at most as large as the key, '+Inf' for all."""

    count: int
    sum: float
    buckets: Mapping[str, int]


def metrics_of(stats: EngineStats) -> list[Metric]:
    """All that a snapshot says."""
    used = stats.total_blocks - stats.free_blocks
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": used / stats.total_blocks if stats.total_blocks else 0.0,
    }
    counters = {name: getattr(stats, field) for field, (name, _) in ENGINE_COUNTERS.items()}
    found: list[Metric] = [Gauge(name=PREFIX + name, value=float(value)) for name, value in gauges.items()]
    found += [Counter(name=PREFIX + name, value=value) for name, value in counters.items()]
    found += [
        Counter(name=PREFIX + "request_success", labels={"finished_reason": reason}, value=number)
        for reason, number in sorted(stats.finished.items())
    ]
    found.append(_step_sizes(stats))
    return found


def _step_sizes(stats: EngineStats) -> Histogram:
    """Tokens a step; see EngineStats.step_sizes for the bounds."""
    buckets: dict[str, int] = {}
    below = 0
    for i, number in enumerate(stats.step_sizes):
        below += number
        buckets["+Inf" if i == len(stats.step_sizes) - 1 else str(2**i - 1)] = below
    return Histogram(
        name=PREFIX + "iteration_tokens_total", count=below, sum=float(stats.step_tokens), buckets=buckets
    )
