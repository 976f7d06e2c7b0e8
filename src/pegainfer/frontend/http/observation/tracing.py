"""Traces: recorded for as long as the server runs (`--trace`), or for some seconds (POST /debug/trace)."""

from __future__ import annotations

import asyncio
import contextlib

from pegainfer.contract.handle import EngineHandle
from pegainfer.contract.observation import Observer, TraceBuffer
from pegainfer.contract.trace import StepTrace
from pegainfer.frontend.http.observation.metrics import FrontMetrics

LAST_SECONDS = 2.0  # that the records of the last steps may take to come


class Tracing:
    """Records while somebody wants it. Belongs to an event loop; steps may come from another thread."""

    def __init__(
        self, engine: EngineHandle, observers: list[Observer], buffer: TraceBuffer, metrics: FrontMetrics
    ) -> None:
        """
        Args:
            observers: of requests; the buffer is one of them while it records.
            buffer: keeps what was recorded.
            metrics: show whether a trace is being taken.
        """
        self._engine = engine
        self._observers = observers
        self.buffer = buffer
        self._metrics = metrics
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first `start`
        self._last = asyncio.Event()  # records came after the recording had ended

    def start(self) -> None:
        """One more wants it; each `start` has its `stop`."""
        self._users += 1
        if self._users == 1:
            self._loop = asyncio.get_running_loop()
            self._metrics.recording = True
            self._observers.append(self.buffer)
            self._engine.trace(self._sink)

    async def stop(self) -> None:
        """One wants it no more. Returns when the steps until now are in the buffer."""
        self._users -= 1
        if self._users:
            return
        self._metrics.recording = False
        if not self._engine.alive():
            self._observers.remove(self.buffer)
            return
        self._last.clear()
        self._engine.trace(None)
        with contextlib.suppress(TimeoutError):  # a step may take longer: its record is then left out
            await asyncio.wait_for(self._last.wait(), LAST_SECONDS)
        if not self._users:
            self._observers.remove(self.buffer)

    def _sink(self, steps: list[StepTrace]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, steps)

    def _take(self, steps: list[StepTrace]) -> None:
        self.buffer.steps(steps)
        if not self._users:
            self._last.set()
