"""Publishes KV events of the block pools of all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.contract.kv_events import KVEventSink
from pegainfer.kv.events import KVEvents
from pegainfer.kv.manager import KVManager


class CacheEvents:
    """Owns the sink. Used on the engine's thread."""

    def __init__(self, sink: KVEventSink, ranks: Sequence[KVManager]) -> None:
        """Publishes the blocks that the pools have already."""
        self._sink = sink
        self._events = []
        for rank, kv in enumerate(ranks):
            kv.events = KVEvents(sink, rank, kv.groups, kv.pools, kv.unit, kv.tiers)
            self._events.append(kv.events)
        self.flush()

    def flush(self) -> None:
        """Publishes what has changed since the last call. Called after each commit."""
        for events in self._events:
            events.flush()

    def close(self) -> None:
        self.flush()
        self._sink.close()
