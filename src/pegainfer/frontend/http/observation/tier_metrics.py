"""Figures of the KV tiers and of prefill peers on the metrics page; none without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pegainfer.contract.event import EngineStats

if TYPE_CHECKING:
    from prometheus_client import Metric

# Fields of TierStats: name without _total, help.
_GAUGES = {
    "cached_blocks": ("kv_tier_blocks", "Blocks and states that a KV tier holds."),
    "total_blocks": ("kv_tier_capacity", "Blocks and states that a KV tier has room for."),
    "in_flight": ("kv_tier_transfers", "Copies to or from a KV tier that wait or are under way."),
}
_COUNTERS = {
    "hit_tokens": ("kv_tier_hit_tokens", "Prompt tokens whose KV was loaded from a tier."),
    "loaded_bytes": ("kv_tier_loaded_bytes", "Bytes read from a tier."),
    "loaded_seconds": ("kv_tier_loaded_seconds", "Time of these copies, summed."),
    "saved_bytes": ("kv_tier_saved_bytes", "Bytes written to a tier."),
    "saved_seconds": ("kv_tier_saved_seconds", "Time of these copies, summed."),
    "failures": ("kv_tier_failures", "Copies to or from a tier that failed; what a load lacks is computed."),
    "refused_loads": ("kv_tier_refused_loads", "Prefixes computed because to load them would take longer."),
}
# Fields of PeerStats.
_PEER_GAUGES = {
    "connected": ("kv_peer_connected", "Whether a prefill peer is connected."),
    "outstanding": ("kv_peer_outstanding", "Prompts that a prefill peer is computing."),
}
_PEER_COUNTERS = {
    "requests": ("kv_peer_requests", "Prompts that a prefill peer was asked to compute."),
    "failures": ("kv_peer_failures", "Of these, prompts that it did not finish; they were computed here."),
    "blocks": ("kv_peer_blocks", "Blocks and states read from a prefill peer."),
    "nbytes": ("kv_peer_read_bytes", "Bytes of these blocks."),
    "seconds": ("kv_peer_read_seconds", "Time of these reads, summed; reads overlap."),
}


def tier_families(prefix: str, model: str, stats: EngineStats) -> Iterator[Metric]:
    """One family a field, with one value a tier.

    Args:
        prefix: of every name.
        model: the label model_name.
    """
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    for fields, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for field, (name, text) in fields.items() if stats.tiers else ():
            family = kind(prefix + name, text, labels=["model_name", "tier"])
            for tier in stats.tiers:
                family.add_metric([model, tier.kind], getattr(tier, field))
            yield family
    for fields, kind in ((_PEER_GAUGES, GaugeMetricFamily), (_PEER_COUNTERS, CounterMetricFamily)):
        for field, (name, text) in fields.items() if stats.peers else ():
            family = kind(prefix + name, text, labels=["model_name", "peer"])
            for peer in stats.peers:
                family.add_metric([model, peer.address], getattr(peer, field))
            yield family
