"""A step on the GPU's stream: what it will have drawn, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pegainfer.contract.step import StepPlan, StepResult
from pegainfer.kv.device.transfers import Transfers
from pegainfer.runner.pooling import HiddenPart, Pools, WholePrompt
from pegainfer.runner.results import DrawnRing, HiddenBuffer, ResultBuffer
from pegainfer.runner.sampling import PromptPart, gathered_logprobs, step_result
from pegainfer.runner.staging import StagedRows
from pegainfer.runtime.cuda.stream import Event

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """A forward pass on the stream, to be sampled before the next one."""

    plan: StepPlan
    rows: StagedRows  # where steps repeat one, those of that one
    results: ResultBuffer
    continues: bool  # the rows of the step before, each a token on
    began: Event  # where the step's time begins: where the one before ends, if that still runs
    drawn: int | None  # slot of the ring, of a step that draws too: `sample` has nothing to do
    stage_seconds: float

    def __str__(self) -> str:
        return f"step {self.plan.step}, sizes {self.rows.env}"


class Part(NamedTuple):
    """Prompt log-probabilities on their way. `spare` takes the buffer when it has been read."""

    asked: PromptPart
    results: ResultBuffer
    spare: deque[ResultBuffer]


class PendingPools(NamedTuple):
    """Hidden states on their way, and the prompts that are complete with them."""

    parts: list[tuple[HiddenPart, HiddenBuffer]]
    whole: list[WholePrompt]

    def read(self, pools: Pools, spare: deque[HiddenBuffer]) -> dict[int, bytes]:
        """By row of the plan; to be called once, step after step."""
        for part, buffer in self.parts:
            pools.add(part, buffer.array(part.call.env["L"]))
            spare.append(buffer)
        return {prompt.row: pools.take(prompt) for prompt in self.whole}


class PendingDraw:
    """Implements contract.step.PendingStep."""

    __slots__ = (
        "_cold_seconds", "_parts", "_pooled", "_result", "_ring", "_spare", "_step", "_transfers", "_wait"
    )  # fmt: skip

    def __init__(
        self,
        step: Step,
        parts: list[Part],
        pooled: Callable[[], dict[int, bytes]],
        ring: DrawnRing,
        spare: deque[ResultBuffer],
        cold_seconds: float,
        wait: Callable[[Event, object], None],
        transfers: Transfers | None = None,
    ) -> None:
        """
        Args:
            pooled: reads the vectors of prompts that are complete, once the step has ended.
            spare: takes each buffer when it has been read.
            cold_seconds: of the host, making graphs for the step.
            wait: see Parts.
            transfers: the step's result names those that have ended.
        """
        self._wait = wait
        self._cold_seconds = cold_seconds
        self._transfers = transfers
        self._pooled = pooled
        self._ring = ring
        self._spare = spare
        self._step = step
        self._parts = parts
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None or self._step.results.ended.done()

    def wait(self) -> StepResult:
        if self._result is None:
            step = self._step
            self._wait(step.results.ended, step)
            self._result = self._read()
            if self._cold_seconds:
                self._result = msgspec.structs.replace(self._result, cold_seconds=self._cold_seconds)
            if self._transfers is not None:
                self._result = self._transfers.add_ended(step.plan, self._result)
            self._spare.append(step.results)
            for part in self._parts:
                part.spare.append(part.results)
        return self._result

    def _read(self) -> StepResult:
        step = self._step
        rows, results = step.rows, step.results
        seconds = results.ended.milliseconds_since(step.began) / 1e3
        count = len(rows.sampling)
        drawn: dict[str, Array] | None
        if step.drawn is None:
            drawn = results.arrays(count) if count else None
        elif (tokens := self._ring.tokens(step.drawn, count)) is not None:
            return StepResult(
                step=step.plan.step, tokens=tuple(zip(tokens, strict=True)), seconds=seconds,
                stage_seconds=step.stage_seconds,
            )  # fmt: skip
        else:
            drawn = self._ring.arrays(step.drawn, count)
        logprobs = gathered_logprobs((p.asked, p.results.arrays(len(p.asked.targets))) for p in self._parts)
        return step_result(step.plan, rows, drawn, logprobs, seconds, step.stage_seconds, self._pooled())
