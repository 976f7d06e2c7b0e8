"""Steps of the null device between `forward` and the end of their wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.null.memory import Uses


class NullStep:
    """A plan between `forward` and the end of its wait."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.uses: Uses = {}
        self.sampled: set[int] = set()  # slots with a sampling row
        self.starts: list[int] = []  # where each row really began


class NullPending:
    """A step whose result is known and whose latency is yet to pass."""

    def __init__(
        self,
        settle: Callable[[NullStep], None],
        step: NullStep,
        result: StepResult | Exception,
        ready: float,
    ) -> None:
        """
        Args:
            settle: called when the result is taken.
            ready: seconds of the monotonic clock.
        """
        self._settle, self._step, self._result, self._ready = settle, step, result, ready

    def done(self) -> bool:
        return time.monotonic() >= self._ready

    def wait(self) -> StepResult:
        """Sleeps out the step's latency. Raises the fault that was injected into it."""
        left = self._ready - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._settle(self._step)
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
