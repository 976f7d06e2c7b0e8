"""The steps in flight: plans go to the runner one by one, and their results come back in the same order.

    policy.schedule ─► runner.forward ─► masks ─► runner.sample ─► in flight ─► wait ─► policy.commit

Rows that obey a grammar get their masks between forward and sample, while the device computes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from pegainfer.contract.errors import EngineDeadError, InvariantError, PegaError
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.step import Constraint, PendingStep, Runner, StepPlan, StepPolicy, StepResult, Tracer
from pegainfer.contract.trace import OpTimes, StepSink
from pegainfer.engine.recorder import StepRecorder

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps in a row that may fail before the runner counts as unusable

Clock = Callable[[], float]  # seconds


class _Failed(msgspec.Struct, frozen=True):
    """A plan that could not be launched; it stands in line so that plans are committed in order."""

    error: Exception

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        raise self.error


class Pipeline:
    """Used by one thread. How deep it may be is the policy's affair: it gives no plan beyond that."""

    def __init__(
        self,
        runner: Runner,
        policy: StepPolicy,
        masks: Callable[[dict[int, Constraint]], dict[int, bytes]],
        tracer: Tracer | None,
        clock: Clock,
        traced: StepSink,
        op_times: OpTimes | None = None,
    ) -> None:
        """
        Args:
            masks: of a plan's constrained rows, as `Runner.sample` takes them.
            traced: takes the records of steps while the recorder is on.
        """
        self._runner = runner
        self._policy = policy
        self._masks = masks
        self._tracer = tracer
        self._clock = clock
        self._flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._failures = 0  # steps that failed in a row
        self.plan: StepPlan | None = None  # the last one that was started
        # Of the host, by what it did.
        self.seconds = dict.fromkeys(("schedule", "stage", "launch", "wait", "commit", "emit"), 0.0)
        self.recorder = StepRecorder(policy, self.seconds, traced, op_times)

    def __len__(self) -> int:
        """Plans in flight."""
        return len(self._flight)

    def schedule(self) -> tuple[StepPlan | None, list[TokenEvent]]:
        """The policy's next plan, which `start` must get before anything else; None where it gives none."""
        begin = self._clock()
        plan, events = self._policy.schedule(begin)
        self.seconds["schedule"] += self._clock() - begin
        return plan, events

    def start(self, plan: StepPlan) -> list[TokenEvent]:
        """Puts a plan into flight; returns events of plans that had to be committed for its masks."""
        self.plan = plan
        events: list[TokenEvent] = []
        pending: PendingStep
        begin = self._clock()
        try:
            handle = self._runner.forward(plan)
            self.seconds["launch"] += self._clock() - begin
        except Exception as error:
            pending = _Failed(error)
        else:
            masks = self._masks_of(plan, events)
            begin = self._clock()
            try:
                pending = self._runner.sample(handle, masks)
            except Exception as error:
                pending = _Failed(error)
            self.seconds["launch"] += self._clock() - begin
        self._flight.append((plan, pending))
        return events

    def _masks_of(self, plan: StepPlan, events: list[TokenEvent]) -> dict[int, bytes] | None:
        """The grammars' masks for a plan whose forward pass is running; adds events of earlier commits.

        The mask of a row that follows needs the token of the plan before, so that plan is committed first:
        the device has the forward pass to do meanwhile, and no other row waits for the host.
        """
        rows = self._policy.constrained()
        if not rows:
            return None
        if any(plan.rows[i].follow for i in rows):
            while self._flight:
                events += self.commit()
            rows = self._policy.constrained()
        begin = self._clock()
        masks = self._masks(rows)
        self.seconds["mask"] = self.seconds.get("mask", 0.0) + self._clock() - begin
        return masks

    def commit(self) -> list[TokenEvent]:
        """Waits for the oldest plan in flight and applies its result.

        A step that fails ends its rows with an error. Raises the step's error where the runner cannot go on:
        EngineDeadError, InvariantError, or any that comes MAX_FAILURES times in a row.
        """
        plan, pending = self._flight.popleft()
        begin = self._clock()
        try:
            result = pending.wait()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if isinstance(error, EngineDeadError | InvariantError) or self._failures >= MAX_FAILURES:
                raise
            log.exception("step %d failed", plan.step)
            message = f"the engine failed at this request's step: {describe(error)}"
            rows = range(len(plan.rows))
            result = StepResult(step=plan.step, tokens=((),) * len(rows), errors=dict.fromkeys(rows, message))
        waited = self._clock()
        self.seconds["wait"] += waited - begin
        self.seconds["stage"] += result.stage_seconds
        if self.recorder.on:
            self.recorder.step(plan, result, waited)
        events = self._policy.commit(plan, result, waited)
        self.seconds["commit"] += self._clock() - waited
        if self._tracer is not None:
            self._tracer.step(plan, result, waited)
        return events


def describe(error: BaseException) -> str:
    """What a client may read: our own messages, else only the kind of the exception."""
    return str(error) if isinstance(error, PegaError) else type(error).__name__
