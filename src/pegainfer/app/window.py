"""Runs many requests through an engine of this process, some at a time, until all have ended."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from pegainfer.app.continuation import Running
from pegainfer.contract.errors import RequestError
from pegainfer.contract.event import TokenEvent
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine

P = ParamSpec("P")
T = TypeVar("T")


class Window:
    """Keeps enough requests in the engine to fill every slot while those before are finishing.

    The rest waits here, so that the engine's own queue is never full.
    """

    def __init__(self, engine: InProcessEngine, scheduler: SchedulerConfig) -> None:
        self._engine = engine
        self._max_live = min(2 * engine.info.max_slots, scheduler.max_waiting_requests)
        self._max_live_tokens = scheduler.max_waiting_tokens

    def finish(self, requests: Sequence[Running], *, show: bool) -> None:
        """Submits the requests in their order and takes events until all have ended.

        Args:
            show: a progress bar where standard error is a terminal.

        Raises RequestError that names the prompt at fault; the others are then cancelled.
        """
        from pegainfer.app.progress import counting

        live: dict[str, Running] = {}
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        waiting = deque(enumerate(requests))
        numbers = {r.id: i for i, r in enumerate(requests)}
        with counting("generate", len(requests), show) as advance:
            try:
                self._submit(waiting, live, events)
                while live:
                    event = events.get()
                    request = live.get(event.request_id)
                    if request is None:
                        continue  # cancelled after its last stop string
                    done, cancel = numbered(numbers[request.id], request.take, event)
                    if cancel:
                        self._engine.cancel(request.id)
                    if done:
                        del live[request.id]
                        advance(request.num_tokens)
                        self._submit(waiting, live, events)
            finally:
                for request_id in live:
                    self._engine.cancel(request_id)

    def _submit(
        self,
        waiting: deque[tuple[int, Running]],
        live: dict[str, Running],
        events: queue.SimpleQueue[TokenEvent],
    ) -> None:
        """Fills the window: at least one request, then as many as the engine may let wait."""
        tokens = sum(r.prompt_tokens for r in live.values())
        while waiting and len(live) < self._max_live:
            number, request = waiting[0]
            tokens += request.prompt_tokens
            if live and tokens > self._max_live_tokens:
                return
            waiting.popleft()
            live[request.id] = request
            numbered(number, self._engine.submit, request.to_engine(), events.put)


def numbered(number: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls it; a RequestError gets the prompt's number into its message."""
    try:
        return call(*args, **kwargs)
    except RequestError as e:
        raise RequestError(f"prompt {number}: {e}", param=e.param) from None
