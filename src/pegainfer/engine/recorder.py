"""Records each committed step while a trace is taken; costs one comparison a step otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.contract.event import EngineStats
from pegainfer.contract.step import StepPlan, StepPolicy, StepResult
from pegainfer.contract.trace import STAGES, OpTimes, StepSink, StepTrace
from pegainfer.engine.cost import load_of
from pegainfer.engine.interference import CollectorTime, ProcessorWait

HANDOVER_SECONDS = 0.1  # between two handovers while the engine is busy
STATS_PERIOD = 8  # of steps that repeat the one before, one in so many asks for the policy's figures
SLOW = 1.5  # times its price: why a step took longer is looked for


class StepRecorder:
    """Belongs to the engine's thread. Times are seconds of the loop's clock."""

    def __init__(
        self,
        policy: StepPolicy,
        seconds: Mapping[str, float],
        sink: StepSink,
        op_times: OpTimes | None = None,
    ) -> None:
        """
        Args:
            seconds: the host's totals by stage, as the pipeline counts them.
            op_times: of the device; None: it has none.
        """
        self._policy = policy
        self._seconds = seconds
        self._sink = sink
        self._op_times = op_times
        self.on = False
        self._since = 0.0  # the end of the step before, or the time when work came after a rest
        self._before: dict[str, float] = {}  # `seconds` at that time
        self._stats = EngineStats()
        self._steps: list[StepTrace] = []
        self._collector = CollectorTime()
        self._processors = ProcessorWait()
        self._collected = 0.0
        self._handed = 0.0  # when records were handed over last

    def switch(self, on: bool, now: float) -> None:
        """Begins or ends the recording. At its end the sink gets what is left, if only an empty list."""
        if on == self.on:
            return
        self.on = on
        self._collector.watch(on)
        self._processors.watch(on)
        if self._op_times is not None:
            self._op_times.switch(on)
        if on:
            self._stats = self._policy.stats()
            self.work(now)
        else:
            steps, self._steps = self._steps, []
            self._sink(steps)

    def work(self, now: float) -> None:
        """The engine has work after a rest, or the recording begins: the next step's period starts here."""
        self._since, self._before = now, dict(self._seconds)
        self._collected = self._collector.seconds
        self._processors.seconds()

    def step(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """A step ended at `now`. Call it before the commit, so that the price does not know its time."""
        price, decode_price = self._policy.price(plan)
        load = load_of(plan.rows)
        before = stats = self._stats
        if not plan.repeats or plan.step % STATS_PERIOD == 0:
            stats = self._policy.stats()
        seconds, collected = dict(self._seconds), self._collector.seconds
        spent = {name: value - self._before.get(name, 0.0) for name, value in seconds.items()}
        period = now - self._since
        slow = period > SLOW * price
        spent["other"] = max(0.0, period - sum(v for name, v in spent.items() if name in STAGES))
        self._steps.append(
            StepTrace(
                step=plan.step,
                ended=now,
                period=period,
                device=result.seconds,
                price=price,
                decode_price=decode_price,
                stages=tuple(spent.get(name, 0.0) for name in STAGES),
                stage=result.stage_seconds,
                cold=result.cold_seconds,
                collect=collected - self._collected,
                starved=self._processors.seconds() if slow else 0.0,
                decode_rows=load.decode_rows,
                prefill_rows=len(plan.rows) - load.decode_rows,
                prefill_tokens=load.prefill_tokens,
                context=load.context,
                running=stats.running,
                waiting=stats.waiting,
                loading=stats.loading,
                free_blocks=stats.free_blocks,
                preempted=stats.preemptions - before.preemptions,
                ops=self._op_times.take() if self._op_times is not None else {},
            )
        )
        self._stats, self._since, self._before, self._collected = stats, now, seconds, collected
        if now - self._handed >= HANDOVER_SECONDS:
            self._handed = now
            self._processors.seconds()  # so that a slow step counts only what happened during it
            self.flush()

    def flush(self) -> None:
        """Hands over what waits."""
        if self._steps:
            steps, self._steps = self._steps, []
            self._sink(steps)
