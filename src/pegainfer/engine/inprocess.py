"""An EngineHandle without a process boundary: for the offline API and for tests."""

from __future__ import annotations

import logging
import threading
import time

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.codec import Call, LoadAdapter, ResetPrefixCache, UnloadAdapter
from pegainfer.contract.errors import EngineDeadError, PegaError, RequestError
from pegainfer.contract.event import EngineStats, TokenEvent, error_events
from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.handle import DoneSink, EngineInfo, EventSink, PendingCalls
from pegainfer.contract.peers import PeerSide
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Runner, StepPolicy, Tracer
from pegainfer.contract.trace import StepSink, StepTrace
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.loop import EngineLoop
from pegainfer.engine.pipeline import Clock
from pegainfer.engine.scheduler import Scheduler

log = logging.getLogger(__name__)


class InProcessEngine:
    """Implements contract.handle.EngineHandle. Sinks are called on the engine's thread."""

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        config: SchedulerConfig | None = None,
        *,
        policy: StepPolicy | None = None,
        tracer: Tracer | None = None,
        grammars: GrammarFactory | None = None,
        clock: Clock = time.monotonic,
        peers: PeerSide | None = None,
    ) -> None:
        """Starts the engine's thread, which closes `runner` at the end.

        Args:
            policy: replaces the scheduler.
            grammars: None: requests with a grammar are refused.
            clock: seconds, of all timings.
            peers: connections to other engines, closed at the end.
        """
        self._info = info
        self._lock = threading.Lock()
        self._live: dict[str, tuple[EventSink, set[int]]] = {}  # sink, and the indices without a finish
        self._calls = PendingCalls()
        self._adapters: tuple[AdapterInfo, ...] = ()
        self._step_sink: StepSink | None = None
        config = config or SchedulerConfig()
        policy = policy or Scheduler(runner.info, config)
        max_wait = config.max_wait_seconds
        self._loop = EngineLoop(
            runner, policy, self, tracer=tracer, grammars=grammars, max_wait=max_wait, clock=clock,
            peers=peers,
        )  # fmt: skip
        self._loop.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        """Hands a request over. A refusal comes as an ERROR event of each index that names its exception.

        Raises EngineDeadError, and RequestError where a live request has the same id.
        """
        with self._lock:
            if request.id in self._live:
                raise RequestError("a live request has this id", got=request.id[:64], param="request_id")
            self._live[request.id] = (sink, set(range(request.n)))
        try:
            self._loop.submit(request)
        except EngineDeadError:
            with self._lock:
                del self._live[request.id]
            raise

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._loop.cancel(request_id, index)

    def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
        self._call(LoadAdapter(self._calls.add(done), name, path, inplace))

    def unload_adapter(self, name: str, done: DoneSink) -> None:
        self._call(UnloadAdapter(self._calls.add(done), name))

    def reset_prefix_cache(self, done: DoneSink) -> None:
        self._call(ResetPrefixCache(self._calls.add(done)))

    def _call(self, message: Call) -> None:
        try:
            self._loop.call(message)
        except EngineDeadError as error:
            self._calls.end(message.call, error)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._adapters

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def trace(self, sink: StepSink | None) -> None:
        """`sink` is called on the engine's thread; the last time soon after None was given."""
        if sink is not None:
            self._step_sink = sink
        self._loop.trace(sink is not None)

    def alive(self) -> bool:
        return self._loop.alive()

    def death(self) -> EngineDeadError | None:
        return self._loop.death()

    def drain(self) -> None:
        self._loop.drain()

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits until the last request has ended after `drain`; False if that took longer than `timeout`."""
        return self._loop.wait_drained(timeout)

    def close(self) -> None:
        """Aborts what is live and waits for the engine's thread."""
        self._loop.close()
        self._calls.end_all(EngineDeadError("the engine was closed"))

    # EngineSink, on the engine's thread

    def events(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        for event in events:
            entry = self._live.get(event.request_id)
            if entry is None:
                continue
            sink, indices = entry
            if event.finish is not None:
                indices.discard(event.index)
                if not indices:
                    with self._lock:
                        del self._live[event.request_id]
            try:
                sink(event)
            except Exception:
                # One request's fault must not stop the others' events.
                log.exception("the event sink of request %s failed", event.request_id)

    def refused(self, request: GenerateRequest, error: PegaError) -> None:
        self.events(error_events(request.id, range(request.n), error), None)

    def adapters_changed(self, adapters: list[AdapterInfo]) -> None:
        self._adapters = tuple(adapters)

    def done(self, call: int, error: PegaError | None) -> None:
        self._calls.end(call, error)

    def steps(self, steps: list[StepTrace]) -> None:
        if self._step_sink is not None:
            self._step_sink(steps)

    def drained(self) -> None:
        log.info("drained")

    def dead(self, error: EngineDeadError) -> None:
        log.error("the engine is dead: %s", error)
        self._calls.end_all(error)
