"""What /metrics shows of a mixture of experts: tokens of each expert, and each layer's imbalance."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pegainfer.contract.experts import ExpertTokens

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def expert_metrics(experts: ExpertTokens, model: str, prefix: str) -> Iterator[Metric]:
    """A counter for each expert of each layer, and each layer's imbalance once a token went through it."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    tokens = CounterMetricFamily(
        prefix + "expert_tokens", "Tokens that an expert was given.", labels=["model_name", "layer", "expert"]
    )
    imbalance = GaugeMetricFamily(
        prefix + "expert_imbalance",
        "Tokens of a layer's busiest expert over the mean of all its experts, since the start.",
        labels=["model_name", "layer"],
    )
    for layer, counts in by_layer(experts):
        for expert, count in enumerate(counts):
            tokens.add_metric([model, str(layer), str(expert)], count)
        if total := sum(counts):
            imbalance.add_metric([model, str(layer)], max(counts) * len(counts) / total)
    yield tokens
    yield imbalance


def by_layer(experts: ExpertTokens) -> Iterator[tuple[int, list[int]]]:
    """(layer, tokens of each of its experts)"""
    counts = array("q", experts.tokens)
    for i, layer in enumerate(experts.layers):
        yield layer, counts[i * experts.num_experts : (i + 1) * experts.num_experts].tolist()
