"""Prompts whose vectors are asked for, on a runner of any device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, PendingStep, Row, Runner, SlotBlocks, StepPlan, StepResult

Array = np.ndarray[Any, Any]


class PooledPrompts:
    """One runner; each prompt enters a slot of its own, is computed in rows of given sizes, and leaves."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.steps = itertools.count(1)

    def start(self, **parts: Any) -> PendingStep:
        return self.runner.sample(self.runner.forward(StepPlan(step=next(self.steps), **parts)))

    def run(self, **parts: Any) -> StepResult:
        return self.start(**parts).wait()

    def embed(self, ids: list[int], pooling: Any, sizes: list[int], **sampling: Any) -> StepResult:
        """The result of the last row; `sizes` add up to the prompt's length."""
        params = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling, **sampling)
        news: tuple[NewSlot, ...] = (
            NewSlot(slot=1, seq=1, tokens=pack_tokens(ids), num_prompt=len(ids), sampling=params, seed=0),
        )
        blocks: tuple[SlotBlocks, ...] = (SlotBlocks(1, 0, tuple(range(4))),)
        start = 0
        for size in sizes:
            row = Row(1, start, size, start + size == len(ids))
            result = self.run(news=news, blocks=blocks, rows=(row,))
            news, blocks = (), ()
            start += size
        self.run(frees=(1,))
        return result


def vector(result: StepResult) -> Array:
    """Of the step's first row."""
    return np.frombuffer(result.pooled[0], "<f4")
