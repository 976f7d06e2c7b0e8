"""The engine's thread: takes requests from an inbox, keeps two plans in flight, hands events out.

    inbox ─► policy.add ─► policy.schedule ─► runner.forward, sample ─► in flight ─► wait ─► policy.commit
                                   └────────────── events, once a step ──────────────────────────┘

A plan is scheduled whenever the policy gives one; when it gives none (the pipeline is full, or nothing can be
done before the next commit), the oldest plan in flight is waited for. Rows that obey a grammar get their
masks between forward and sample, while the device computes. With nothing in flight and no work, the thread
sleeps until the inbox wakes it.

Long because the inbox, the steps and the end all change the same few fields, on one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pegainfer.contract.codec import Cancel
from pegainfer.contract.errors import EngineDeadError, InvariantError, PegaError, QueueFullError, RequestError
from pegainfer.contract.event import EngineStats, FinishReason, TokenEvent
from pegainfer.contract.grammar import GrammarFactory, Matcher
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import PendingStep, Preparing, Runner, StepPlan, StepPolicy, StepResult, Tracer
from pegainfer.engine.grammars import Compiled, Grammars
from pegainfer.engine.sink import EngineSink
from pegainfer.engine.watchdog import Progress

log = logging.getLogger(__name__)

STATS_PERIOD = 0.05  # seconds between two snapshots while steps go on; finishes and idleness bring their own
MAX_FAILURES = 3  # steps in a row that may fail before the runner counts as unusable
CALM_SECONDS = 0.2  # without a request until the runner may make more ready: a client may ask one by one
DRAIN_RETRY = 5.0  # Retry-After in seconds while draining: another server will have taken over

Clock = Callable[[], float]
_Message = GenerateRequest | Compiled | Cancel | None


@dataclass(frozen=True)
class _Failed:
    """A plan that could not be launched; it stands in line so that plans are committed in order."""

    error: Exception

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        raise self.error


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
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._sink = sink
        self._tracer = tracer
        self._clock = clock
        # Requests to add, cancels, and None where draining begins: what came before it is still taken.
        self._inbox: deque[_Message] = deque()
        self._grammars = Grammars(grammars, self._put)
        self._wake = threading.Event()
        self._door = threading.Lock()  # so that nothing enters the inbox after its last look
        self._draining = False
        self._closing = False
        self._death: EngineDeadError | None = None
        self._early: dict[str, list[Cancel]] = {}  # of one index, while the request's grammar is compiled
        self._open: dict[str, set[int]] = {}  # indices without a finish, by request
        self._pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self._failures = 0  # steps that failed in a row
        self._seconds = dict.fromkeys(("schedule", "stage", "launch", "wait", "commit", "emit"), 0.0)
        self._turns = 0
        self._resting = False
        self._plan: StepPlan | None = None  # the last one that was launched
        self._refusals = 0  # by the loop itself: draining
        self._stats = EngineStats()
        self._stats_at = 0.0
        self._quiet = False  # idle, and the last snapshot says so
        self._preparing = runner if isinstance(runner, Preparing) else None  # None too when all is ready
        self._drained = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # From any thread

    def start(self) -> None:
        self._snapshot(self._clock())
        self._thread.start()

    def submit(self, request: GenerateRequest) -> None:
        """Puts a request into the inbox; a refusal comes through the sink. Raises EngineDeadError."""
        self._put(request)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request, or one of its indices, at the next step; harmless after its end."""
        try:
            self._put(Cancel(request_id, index))
        except EngineDeadError:
            log.debug("cancel of %r after the engine's end", request_id)

    def drain(self) -> None:
        """Takes no more requests; what was submitted before goes on."""
        try:
            self._put(None)
        except EngineDeadError:
            log.debug("drain after the engine's end")

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits for the end of the last request after `drain`, or for the engine's end."""
        return self._drained.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Aborts what is live, closes the runner and ends the thread; False if it did not end in time."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        """The latest snapshot."""
        return self._stats

    def progress(self) -> Progress:
        """Where the loop is, for a watchdog."""
        return Progress(self._turns, self._resting, self._plan)

    def alive(self) -> bool:
        return self._death is None and self._thread.is_alive()

    def death(self) -> EngineDeadError | None:
        """Why it has ended; None while it lives."""
        return None if self.alive() else self._death or EngineDeadError("the engine was not started")

    def _put(self, message: _Message) -> None:
        with self._door:
            if self._death is not None:
                raise self._death
            self._inbox.append(message)
        self._wake.set()

    # On the engine's thread

    def _main(self) -> None:
        death = EngineDeadError("the engine was closed")
        try:
            while not self._closing:
                self._turn()
                self._turns += 1
            self._finish_all()
        except Exception as error:
            log.exception("the engine's thread failed")
            death = EngineDeadError(
                f"the engine failed: {_describe(error)}", remedy="restart the server; its log says why"
            )
        self._end(death)

    def _turn(self) -> None:
        """One round: the inbox, a plan if there is one, else a commit, else sleep."""
        self._wake.clear()
        self._take_inbox()
        if self._launch():
            return
        if self._pending:
            self._commit()
        elif not self._policy.has_work():
            self._rest()
        else:
            raise InvariantError("the policy has work but no plan, and nothing is in flight")

    def _take_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                self._draining = True
            elif isinstance(message, Cancel):
                self._cancel(message)
            elif isinstance(message, Compiled):
                if self._grammars.claim_compiled(message):
                    self._add(message.request, message.matcher)
                for cancel in self._early.pop(message.request.id, ()):
                    self._policy.cancel(cancel.request_id, cancel.index)
            else:
                self._admit(message)

    def _cancel(self, cancel: Cancel) -> None:
        request_id = cancel.request_id
        if cancel.index is not None and self._grammars.waits(request_id):
            self._early.setdefault(request_id, []).append(cancel)
            return
        waiting = self._grammars.claim(request_id)
        if waiting is None:
            self._policy.cancel(request_id, cancel.index)
            return
        self._early.pop(request_id, None)
        self._emit(
            [TokenEvent(request_id=request_id, index=i, finish=FinishReason.ABORT) for i in range(waiting.n)]
        )

    def _admit(self, request: GenerateRequest) -> None:
        """A new request: added at once, or when its grammar is compiled."""
        matcher: Matcher | PegaError | None = None
        try:
            if self._draining:
                self._refusals += 1
                raise QueueFullError("the server is shutting down", retry_after=DRAIN_RETRY)
            if request.grammar is not None:
                if request.id in self._open:
                    raise RequestError("a live request has this id", got=request.id[:64], param="request_id")
                matcher = self._grammars.take(request)
                if matcher is None:
                    self._open[request.id] = set(range(request.n))
                    return
        except PegaError as error:
            matcher = error
        self._add(request, matcher)

    def _add(self, request: GenerateRequest, matcher: Matcher | PegaError | None) -> None:
        try:
            if isinstance(matcher, PegaError):
                raise matcher
            self._policy.add(request, self._clock(), matcher)
            self._open[request.id] = set(range(request.n))
        except PegaError as error:
            if matcher is not None:
                self._open.pop(request.id, None)
            self._quiet = False
            self._sink.refused(request, error)

    def _launch(self) -> bool:
        """Schedules and starts one plan; False if the policy gave none."""
        begin = self._clock()
        plan, events = self._policy.schedule(begin)
        planned = self._clock()
        self._seconds["schedule"] += planned - begin
        if plan is not None:
            self._plan = plan
            self._tell_work(planned)
            pending: PendingStep
            try:
                handle = self._runner.forward(plan)
                self._seconds["launch"] += self._clock() - planned
            except Exception as error:
                pending = _Failed(error)
            else:
                masks = self._masks(plan, events)
                begin = self._clock()
                try:
                    pending = self._runner.sample(handle, masks)
                except Exception as error:
                    pending = _Failed(error)
                self._seconds["launch"] += self._clock() - begin
            self._pending.append((plan, pending))
        self._emit(events)
        return plan is not None

    def _masks(self, plan: StepPlan, events: list[TokenEvent]) -> dict[int, bytes] | None:
        """The grammars' masks for a plan whose forward pass is running; adds events of earlier commits.

        The mask of a row that follows needs the token of the plan before, so that plan is committed first:
        the device has the forward pass to do meanwhile, and no other row waits for the host.
        """
        rows = self._policy.constrained()
        if not rows:
            return None
        if any(plan.rows[i].follow for i in rows):
            while self._pending:
                events += self._commit_oldest()
            rows = self._policy.constrained()
        begin = self._clock()
        masks = self._grammars.masks(rows)
        self._seconds["mask"] = self._seconds.get("mask", 0.0) + self._clock() - begin
        return masks

    def _commit(self) -> None:
        self._emit(self._commit_oldest())

    def _commit_oldest(self) -> list[TokenEvent]:
        """Waits for the oldest plan in flight and applies its result."""
        plan, pending = self._pending.popleft()
        begin = self._clock()
        try:
            result = pending.wait()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if isinstance(error, EngineDeadError | InvariantError) or self._failures >= MAX_FAILURES:
                raise
            log.exception("step %d failed", plan.step)
            message = f"the engine failed at this request's step: {_describe(error)}"
            rows = range(len(plan.rows))
            result = StepResult(step=plan.step, tokens=((),) * len(rows), errors=dict.fromkeys(rows, message))
        waited = self._clock()
        events = self._policy.commit(plan, result, waited)
        committed = self._clock()
        self._seconds["wait"] += waited - begin
        self._seconds["commit"] += committed - waited
        self._seconds["stage"] += result.stage_seconds
        if self._tracer is not None:
            self._tracer.step(plan, result, waited)
        return events

    def _emit(self, events: list[TokenEvent]) -> None:
        """Hands events to the sink, with a snapshot if one is due."""
        if not events:
            return
        begin = self._clock()
        self._quiet = False
        finishes = [(event.request_id, event.index) for event in events if event.finish is not None]
        for request_id, index in finishes:
            self._open[request_id].remove(index)
            if not self._open[request_id]:
                del self._open[request_id]
        due = bool(finishes) or begin - self._stats_at >= STATS_PERIOD
        self._sink.events(events, self._snapshot(begin) if due else None)
        self._seconds["emit"] += self._clock() - begin

    def _tell_work(self, now: float) -> None:
        """Sends a snapshot if one is due; a prompt in chunks gives no event for many steps."""
        if self._quiet or now - self._stats_at >= STATS_PERIOD:
            self._quiet = False
            self._sink.events([], self._snapshot(now))

    def _rest(self) -> None:
        """Says once that the engine is idle, then sleeps until something comes in."""
        if not self._quiet:
            self._quiet = True
            self._sink.events([], self._snapshot(self._clock()))
        if self._draining and not (self._open or self._inbox or self._drained.is_set()):
            self._drained.set()
            self._sink.drained()
        if not self._closing:
            self._resting = True
            self._sleep()
            self._resting = False

    def _sleep(self) -> None:
        """Until something comes in; meanwhile the runner makes ready what its start had no time for."""
        calm = CALM_SECONDS
        while self._preparing is not None and not self._wake.wait(calm):
            calm = 0.0
            try:
                more = self._preparing.prepare()
            except PegaError:
                log.exception("the runner could not make more ready; steps will ask for it")
                more = False
            if not more:
                self._preparing = None
        self._wake.wait()

    def _snapshot(self, now: float) -> EngineStats:
        stats = self._policy.stats()
        self._stats = msgspec.structs.replace(
            stats, rejections=stats.rejections + self._refusals, host_seconds=dict(self._seconds)
        )
        self._stats_at = now
        return self._stats

    # The end

    def _finish_all(self) -> None:
        """Aborts every request and commits what is in flight."""
        for request_id in tuple(self._open):
            self._cancel(Cancel(request_id))
        while self._policy.has_work():
            self._launch()
            if self._pending:
                self._commit()

    def _end(self, death: EngineDeadError) -> None:
        """No more requests; whoever still waits learns why."""
        with self._door:
            self._death = death
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, GenerateRequest):
                self._sink.refused(message, death)
        events = [
            TokenEvent(
                request_id=request_id,
                index=index,
                finish=FinishReason.ERROR,
                error=str(death),
                error_kind=EngineDeadError.__name__,
            )
            for request_id, indices in self._open.items()
            for index in sorted(indices)
        ]
        if events:
            self._sink.events(events, None)
        try:
            self._runner.close()
        except Exception:
            log.exception("the runner did not close")
        self._drained.set()
        if not self._closing:
            self._sink.dead(death)


def _describe(error: Exception) -> str:
    """What a client may read: our own messages, else only the kind of the exception."""
    return str(error) if isinstance(error, PegaError) else type(error).__name__
