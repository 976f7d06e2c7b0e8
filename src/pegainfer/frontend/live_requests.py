"""The requests that an engine may still speak of, with the sinks of their events."""

from __future__ import annotations

import logging

from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.event import TokenEvent, error_events
from pegainfer.contract.handle import EventSink

log = logging.getLogger(__name__)


class _Live:
    __slots__ = ("open", "sink")

    def __init__(self, sink: EventSink, n: int) -> None:
        self.sink = sink
        self.open = set(range(n))  # indices without a finish


class LiveRequests:
    """By id. A request is forgotten with the finish of its last index."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def check(self, request_id: str) -> None:
        """Raises RequestError for an id that a request has already."""
        if request_id in self._live:
            raise RequestError("a request with this id is running", param="request_id", got=request_id)

    def add(self, request_id: str, sink: EventSink, n: int) -> None:
        """`sink` gets the events of the request's n indices."""
        self._live[request_id] = _Live(sink, n)

    def is_open(self, request_id: str, index: int | None) -> bool:
        """Whether an index of a request, or any of them, has no finish yet."""
        live = self._live.get(request_id)
        return live is not None and (index is None or index in live.open)

    def deliver(self, event: TokenEvent) -> None:
        """Hands an event to its sink, unless that had its finishes already."""
        live = self._live.get(event.request_id)
        if live is None:
            return
        if event.finish is not None:
            live.open.discard(event.index)
            if not live.open:
                del self._live[event.request_id]
        _call(live.sink, event)

    def fail(self, request_id: str, error: PegaError) -> None:
        """Ends the open indices of a request with an error."""
        live = self._live.get(request_id)
        for event in error_events(request_id, sorted(live.open) if live is not None else (), error):
            self.deliver(event)

    def fail_all(self, error: PegaError) -> None:
        """Ends every request with an error."""
        live, self._live = self._live, {}
        for request_id, entry in live.items():
            for event in error_events(request_id, sorted(entry.open), error):
                _call(entry.sink, event)


def _call(sink: EventSink, event: TokenEvent) -> None:
    try:
        sink(event)
    except Exception:
        # One request's fault must not stop the others' events.
        log.exception("a request's event sink failed")
