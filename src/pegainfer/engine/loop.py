"""The engine's thread: takes requests from an inbox, keeps two plans in flight, hands events out.

    inbox ─► policy.add ─► a step started ─► in flight (`pipeline`) ─► committed ─► events, once a step

A plan is started whenever the policy gives one; when it gives none (the pipeline is full, or nothing can be
done before the next commit), the oldest plan in flight is waited for. With nothing in flight and no work, the
thread sleeps until the inbox wakes it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pegainfer.contract.closing import Closing
from pegainfer.contract.codec import Call, Cancel, Trace
from pegainfer.contract.errors import EngineDeadError, InvariantError, PegaError
from pegainfer.contract.event import EngineStats, TokenEvent, error_events
from pegainfer.contract.experts import CountingRunner
from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.peers import Ended, PeerSide, Prefill, Produced, Release, ToDecode, ToPrefill
from pegainfer.contract.ranks import RankedRunner
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Preparing, Runner, StepPolicy, Tracer
from pegainfer.contract.trace import OpTimes
from pegainfer.engine.controls import Controls
from pegainfer.engine.grammars import Grammars
from pegainfer.engine.inbox import Inbox
from pegainfer.engine.intake import Intake, Message
from pegainfer.engine.pipeline import Clock, Pipeline, describe
from pegainfer.engine.sink import EngineSink
from pegainfer.engine.snapshots import Snapshots
from pegainfer.engine.watchdog import Progress

if TYPE_CHECKING:
    from pegainfer.engine.peers import Peers

log = logging.getLogger(__name__)

CALM_SECONDS = 0.2  # without a request until the runner may make more ready: a client may ask one by one


class EngineLoop:
    """Owns a runner and a policy from `start` to `close`. All methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        policy: StepPolicy,
        sink: EngineSink,
        *,
        tracer: Tracer | None = None,
        clock: Clock = time.monotonic,
        grammars: GrammarFactory | None = None,
        max_wait: float = 0.0,
        op_times: OpTimes | None = None,
        peers: PeerSide | None = None,
    ) -> None:
        """
        Args:
            max_wait: the policy's, for requests that it does not have yet: seconds; 0: no bound.
            op_times: of the runner's device, for traces.
            peers: connections to other engines, closed at the end. Raises UnsupportedError where the policy
                knows of no peers.
        """
        self._runner = runner
        self._policy = policy
        self._peers: Peers | None = None
        if peers is not None:
            from pegainfer.engine.peers import PeerFilter, Peers

            self._peers = Peers(peers, policy)
            sink = PeerFilter(sink)
        self._sink = sink
        self._clock = clock
        self._inbox: Inbox[Message | Trace | ToPrefill | ToDecode] = Inbox()
        self._grammars = Grammars(grammars, self._inbox.put, max_wait)
        self._pipeline = Pipeline(runner, policy, self._grammars.masks, tracer, clock, sink.steps, op_times)
        self._recorder = self._pipeline.recorder
        experts = runner.expert_tokens if isinstance(runner, CountingRunner) else lambda: None
        peer_stats = tuple if peers is None else peers.stats
        ranks = runner.rank_seconds if isinstance(runner, RankedRunner) else tuple
        self._snapshots = Snapshots(policy, self._pipeline.seconds, experts, peer_stats, ranks)
        self._controls = Controls(runner, policy, sink, self._inbox.put, clock)
        self._intake = Intake(policy, sink, self._grammars, self._snapshots, self._controls, clock)
        self._closing = False
        self._turns = 0
        self._resting = False
        self._preparing = runner if isinstance(runner, Preparing) else None  # None too when all is ready
        self._drained = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # From any thread

    def start(self) -> None:
        """Starts the engine's thread. Once only."""
        self._snapshots.take(self._clock())
        if self._peers is not None:
            self._peers.start(self._inbox.put)
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Puts a request into the inbox; a refusal comes through the sink. Raises EngineDeadError."""
        self._inbox.put(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its indices, at the next step; harmless after its end."""
        try:
            self._inbox.put(Cancel(request_id, index))
        except EngineDeadError:
            log.debug("cancel of %r after the engine's end", request_id)

    def drain(self) -> None:
        """Takes no more requests; what was submitted before goes on."""
        try:
            self._inbox.put(None)
        except EngineDeadError:
            log.debug("drain after the engine's end")

    def call(self, message: Call) -> None:
        """Changes the engine; the end of it comes through the sink. Raises EngineDeadError."""
        self._inbox.put(message)

    def trace(self, on: bool) -> None:
        """Records steps for the sink from now on, or no longer; harmless after the engine's end."""
        try:
            self._inbox.put(Trace(on))
        except EngineDeadError:
            log.debug("trace after the engine's end")

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits for the end of the last request after `drain`, or for the engine's end."""
        return self._drained.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Aborts what is live, closes the runner and ends the thread; False if it did not end in time."""
        self._closing = True
        self._inbox.wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        """The latest snapshot."""
        return self._snapshots.latest

    def progress(self) -> Progress:
        """Where the loop is, for a watchdog."""
        return Progress(self._turns, self._resting, self._pipeline.plan)

    def alive(self) -> bool:
        return self._inbox.death is None and self._thread.is_alive()

    def death(self) -> EngineDeadError | None:
        """Why it has ended; None while it lives."""
        return None if self.alive() else self._inbox.death or EngineDeadError("the engine was not started")

    # On the engine's thread

    def _main(self) -> None:
        death = EngineDeadError("the engine was closed")
        try:
            while not self._closing:
                self._turn()
                self._turns += 1
            self._finish_all()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("the engine's thread failed")
            death = EngineDeadError(
                f"the engine failed: {describe(error)}", remedy="restart the server; its log says why"
            )
        self._end(death)

    def _turn(self) -> None:
        """One round: the inbox, a plan if there is one, else a commit, else sleep."""
        for message in self._inbox.take():
            if isinstance(message, Trace):
                self._recorder.switch(message.on, self._clock())
            elif isinstance(message, Prefill | Release | Produced | Ended):
                if self._peers is not None:
                    self._peers.obey(message, self._intake)
            else:
                self._emit(self._intake.obey(message))
        self._emit(self._grammars.expired(self._clock()))
        launched = self._launch()
        self._controls.serve()
        if self._peers is not None:
            self._peers.send()
        if launched:
            return
        if self._pipeline:
            self._emit(self._pipeline.commit())
        elif not self._policy.has_work():
            self._rest()
        elif self._controls.num_loading or (self._peers is not None and self._peers.are_awaited()):
            self._resting = True
            self._wait()
            self._resting = False
        else:
            raise InvariantError("the policy has work but no plan, and nothing is in flight")

    def _launch(self) -> bool:
        """Schedules and starts one plan; False if the policy gave none."""
        plan, events = self._pipeline.schedule()
        if plan is not None:
            stats = self._snapshots.at_work(self._clock())
            if stats is not None:
                self._sink.events([], stats)
            events += self._pipeline.start(plan)
        self._emit(events)
        return plan is not None

    def _emit(self, events: list[TokenEvent]) -> None:
        """Hands events to the sink, with a snapshot if one is due."""
        if not events:
            return
        begin = self._clock()
        finishes = self._intake.note_finishes(events)
        self._sink.events(events, self._snapshots.with_events(begin, finishes=finishes))
        self._pipeline.seconds["emit"] += self._clock() - begin

    def _rest(self) -> None:
        """Says once that the engine is idle, then sleeps until something comes in."""
        stats = self._snapshots.at_rest(self._clock())
        if stats is not None:
            self._sink.events([], stats)
        if self._intake.drained and not (self._inbox or self._drained.is_set()):
            self._drained.set()
            self._sink.drained()
        if not self._closing:
            self._resting = True
            self._recorder.flush()
            self._sleep()
            self._resting = False
            if self._recorder.on:
                self._recorder.work(self._clock())

    def _sleep(self) -> None:
        """Until something comes in; meanwhile the runner makes ready what its start had no time for."""
        calm = CALM_SECONDS
        while self._preparing is not None and not self._wait(calm):
            calm = 0.0
            try:
                more = self._preparing.prepare()
            except PegaError:
                log.exception("the runner could not make more ready; steps will ask for it")
                more = False
            if not more:
                self._preparing = None
        self._wait()

    def _wait(self, seconds: float | None = None) -> bool:
        """Until something comes in or a deadline passes; False if there was nothing for so long."""
        left = self._grammars.seconds_left(self._clock())
        if left is None or (seconds is not None and seconds < left):
            return self._inbox.wait(seconds)
        self._inbox.wait(left)
        return True

    # The end

    def _finish_all(self) -> None:
        """Aborts every request and commits what is in flight."""
        for request_id in tuple(self._intake.open):
            self._emit(self._intake.obey(Cancel(request_id)))
        while self._policy.has_work():
            self._launch()
            if self._pipeline:
                self._emit(self._pipeline.commit())

    def _end(self, death: EngineDeadError) -> None:
        """No more requests; whoever still waits learns why."""
        for message in self._inbox.shut(death):
            if isinstance(message, GenerateRequest):
                self._sink.refused(message, death)
        events: list[TokenEvent] = []
        for request_id, indices in self._intake.open.items():
            events += error_events(request_id, sorted(indices), death)
        if events:
            self._sink.events(events, None)
        self._controls.close()
        if self._peers is not None:
            self._peers.close()
        if isinstance(self._policy, Closing):
            try:
                self._policy.close()
            except Exception:
                log.exception("the step policy did not close")
        try:
            self._runner.close()
        except Exception:
            log.exception("the runner did not close")
        self._recorder.switch(False, self._clock())
        self._drained.set()
        if not self._closing:
            self._sink.dead(death)
