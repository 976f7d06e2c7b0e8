"""Requests through a scheduler on a virtual clock: the engine's loop without a thread, a device or a wait.

Two clocks run: the host's and the device's. The host schedules, hands plans over and commits, as
engine/loop.py does; a plan starts on the device when it was handed over and the one before has ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pegainfer.contract.errors import ConfigError, InvariantError, PegaError
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import StepPlan, StepPolicy
from pegainfer.simulate.host import HostPrices
from pegainfer.simulate.runner import SimulatedRunner, SimulatedStep


@dataclass(frozen=True)
class Arrival:
    """A request and the second at which its client wants to send it."""

    at: float
    request: GenerateRequest


@dataclass
class Outcome:
    """What became of one request; seconds of the virtual clock, as its client sees them.

    Args:
        wanted, sent: the arrival, and when a place was free.
        tokens: the time of each event with tokens.
        counts: tokens of each of these events.
        error: empty where it succeeded.
    """

    wanted: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    cached: int = 0
    end: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Usage:
    """Seconds of a run.

    Args:
        seconds: from the first arrival to the last answer.
        device: in steps.
        host: of the engine's thread at work.
        waits: the device had no step although requests were live: it waited for the host.
        steps: plans that ran.
    """

    seconds: float
    device: float
    host: float
    waits: float
    steps: int


class Replay:
    """One run. `concurrency`: most requests in flight; None: any number."""

    def __init__(
        self,
        policy: StepPolicy,
        runner: SimulatedRunner,
        host: HostPrices,
        arrivals: Sequence[Arrival],
        concurrency: int | None = None,
    ) -> None:
        self._policy, self._runner, self._prices = policy, runner, host
        self._arrivals = deque(sorted(arrivals, key=lambda a: a.at))
        self._free = concurrency if concurrency is not None else len(arrivals)
        self._coming: list[tuple[float, int, GenerateRequest]] = []  # on their way to the engine
        self._flight: deque[tuple[StepPlan, SimulatedStep, float]] = deque()  # with the end on the device
        self._outcomes = {a.request.id: Outcome(a.at) for a in arrivals}
        if len(self._outcomes) < len(arrivals):
            raise ConfigError("two requests of a simulation have the same id")
        self._order = [a.request.id for a in arrivals]
        self._host = self._device = 0.0  # the two clocks
        self._busy = self._worked = self._waits = 0.0
        self._rested = True  # nothing was live since the last step
        self._steps = self._sent = 0

    def run(self) -> tuple[list[Outcome], Usage]:
        """All requests to their ends; outcomes in the order of the arrivals. Once only."""
        self._send(0.0)
        while True:
            self._admit()
            if self._start() or self._commit():
                continue
            if self._policy.has_work():
                raise InvariantError("the scheduler has work but no plan, and nothing is in flight")
            if not self._coming:
                break
            self._host = max(self._host, self._coming[0][0])
            self._rested = True
        ends = [o.end for o in self._outcomes.values()]
        usage = Usage(max(ends, default=0.0), self._busy, self._worked, self._waits, self._steps)
        return [self._outcomes[name] for name in self._order], usage

    def _send(self, free_since: float) -> None:
        """Gives free places to the next clients; a place that has just become free is used at once."""
        while self._arrivals and self._free:
            arrival = self._arrivals.popleft()
            self._free -= 1
            sent = max(arrival.at, free_since)
            self._outcomes[arrival.request.id].sent = sent
            self._sent += 1
            heapq.heappush(self._coming, (sent + self._prices.request / 2, self._sent, arrival.request))

    def _admit(self) -> None:
        while self._coming and self._coming[0][0] <= self._host:
            at, _, request = heapq.heappop(self._coming)
            try:
                self._policy.add(request, at)
            except PegaError as error:
                self._finish(request.id, self._host, str(error))

    def _start(self) -> bool:
        """Hands one plan to the device; False if the policy gave none."""
        plan, events = self._policy.schedule(self._host)
        self._emit(events, self._host)
        if plan is None:
            return False
        p = self._prices
        self._work(p.repeat if plan.repeats else p.change + p.change_row * len(plan.rows))
        step = self._runner.sample(self._runner.forward(plan))
        begin = max(self._host, self._device)
        if not self._rested:
            self._waits += begin - self._device
        self._rested = False
        self._device = begin + step.seconds
        self._busy += step.seconds
        self._steps += 1
        self._flight.append((plan, step, self._device))
        return True

    def _commit(self) -> bool:
        """Takes the oldest step's result; False if nothing is in flight."""
        if not self._flight:
            return False
        plan, step, end = self._flight.popleft()
        self._host = max(self._host, end)
        events = self._policy.commit(plan, step.wait(), self._host)
        self._work(self._prices.commit + self._prices.commit_row * len(plan.rows))
        self._emit(events, self._host)
        return True

    def _work(self, seconds: float) -> None:
        self._host += seconds
        self._worked += seconds

    def _emit(self, events: list[TokenEvent], now: float) -> None:
        at = now + self._prices.request / 2
        for event in events:
            outcome = self._outcomes[event.request_id]
            if event.tokens:
                outcome.tokens.append(at)
                outcome.counts.append(len(event.tokens))
                outcome.cached = max(outcome.cached, event.num_cached_tokens)
            if event.finish is not None:
                failed = event.finish is FinishReason.ERROR
                self._finish(event.request_id, at, (event.error or "failed") if failed else "")

    def _finish(self, name: str, at: float, error: str) -> None:
        outcome = self._outcomes[name]
        outcome.end, outcome.error = at, error
        self._free += 1
        self._send(at)
