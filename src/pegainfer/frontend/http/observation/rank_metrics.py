"""What /metrics shows of each of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def rank_metrics(seconds: Sequence[float], model: str, prefix: str) -> Iterator[Metric]:
    """A counter for each rank: its time in steps, which includes what it waits for the other ranks."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(
        prefix + "rank_step_seconds", "Time of a rank in steps.", labels=["model_name", "rank"]
    )
    for rank, total in enumerate(seconds):
        family.add_metric([model, str(rank)], total)
    yield family
