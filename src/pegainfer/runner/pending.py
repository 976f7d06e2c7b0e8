"""A step on the GPU's stream: what it will have drawn, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.kv.device.stage import StagedRows
from pegainfer.runner.results import DrawnRing, ResultBuffer
from pegainfer.runner.sampling import PromptPart, step_result, token_logprobs
from pegainfer.runtime.cuda.stream import Event

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Step:
    """A forward pass on the stream, to be sampled before the next one."""

    plan: StepPlan
    rows: StagedRows
    results: ResultBuffer
    continues: bool  # the rows of the step before, each a token on
    began: Event  # where the step's time begins: where the one before ends, if that still runs
    drawn: int | None  # slot of the ring, of a step that draws too: `sample` has nothing to do
    stage_seconds: float


@dataclass(frozen=True)
class Part:
    """Prompt log-probabilities on their way."""

    asked: PromptPart
    results: ResultBuffer


class PendingDraw:
    """Implements contract.step.PendingStep."""

    def __init__(
        self, step: Step, parts: list[Part], ring: DrawnRing, give_back: Callable[[ResultBuffer], None]
    ) -> None:
        """`give_back`: takes each buffer when it has been read."""
        self._ring = ring
        self._give_back = give_back
        self._step = step
        self._parts = parts
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self._step.results.ended.done()

    def wait(self) -> StepResult:
        if self._result is None:
            step = self._step
            step.results.ended.wait(f"step {step.plan.step}, sizes {step.rows.env}")
            self._result = self._read()
            for results in (step.results, *(p.results for p in self._parts)):
                self._give_back(results)
        return self._result

    def _read(self) -> StepResult:
        rows, results = self._step.rows, self._step.results
        count = len(rows.sampling)
        if self._step.drawn is not None:
            drawn: dict[str, Array] | None = self._ring.arrays(self._step.drawn, count)
        else:
            drawn = results.arrays(count) if count else None
        prompt: dict[int, list[TokenLogprob]] = {}
        for part in self._parts:
            targets = part.asked.targets
            entries = token_logprobs(part.results.arrays(len(targets)), targets)
            prompt.setdefault(part.asked.row, []).extend(e for e in entries if e is not None)
        seconds = results.ended.milliseconds_since(self._step.began) / 1e3
        logprobs = {row: tuple(entries) for row, entries in prompt.items()}
        return step_result(self._step.plan, rows, drawn, logprobs, seconds, self._step.stage_seconds)
