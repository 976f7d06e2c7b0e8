"""Texts run through a runner plan by plan, in any cut, with log-probabilities after every token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, Runner, SlotBlocks, StepPlan, StepResult

Array = np.ndarray[Any, Any]
TOP = 20
PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=TOP, logprobs=TOP, max_tokens=1)


@dataclass(frozen=True)
class Scores:
    """After each token of a text but the first `start`: top ids and log-probabilities, [n, 20]."""

    ids: Array
    logprobs: Array

    def of(self, ids: Array) -> Array:
        """Log-probabilities of these tokens [n, k]; for one that is not among the best, the 20th's."""
        out = np.repeat(self.logprobs[:, -1:], ids.shape[1], 1)
        for k in range(self.ids.shape[1]):
            out = np.where(ids == self.ids[:, k : k + 1], self.logprobs[:, k : k + 1], out)
        return out


class Texts:
    """Puts texts into slots of a runner and computes them in cuts of the caller's choice."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._steps = itertools.count(1)
        self._seq = itertools.count(1)
        self._block_size = runner.info.kv.groups[0].block_size  # type: ignore[union-attr]

    def run(self, **parts: Any) -> StepResult:
        return self.runner.sample(self.runner.forward(StepPlan(step=next(self._steps), **parts))).wait()

    def blocks(self, first: int, length: int) -> tuple[int, ...]:
        return tuple(range(first, first + -(-(length + 1) // self._block_size)))

    def score(
        self, text: Array, chunk: int, *, first_block: int = 0, start: int = 0, slot: int = 0
    ) -> Scores:
        """One text alone, `chunk` tokens a step, from `start` on: its blocks hold what is before."""
        return self.together([text], chunk, first_block=first_block, start=start, slot=slot)[0]

    def together(
        self, texts: Sequence[Array], chunk: int, *, first_block: int = 0, start: int = 0, slot: int = 0
    ) -> list[Scores]:
        """Texts in neighbouring slots, each `chunk` tokens a step; the slots are freed."""
        news, changes, at = [], [], first_block
        for i, text in enumerate(texts):
            news.append(
                NewSlot(
                    slot=slot + i, seq=next(self._seq), tokens=pack_tokens(text.tolist()),
                    num_prompt=len(text), sampling=PARAMS, seed=1,
                )
            )  # fmt: skip
            blocks = self.blocks(at, len(text))
            at += len(blocks)
            changes.append(SlotBlocks(slot + i, 0, blocks))
        found: list[list[TokenLogprob]] = [[] for _ in texts]
        done = [start] * len(texts)
        parts: dict[str, Any] = {"news": tuple(news), "blocks": tuple(changes)}
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            rows, who = [], []
            for i, text in enumerate(texts):
                count = min(chunk, len(text) - done[i])
                if count:
                    rows.append(Row(slot + i, done[i], count, done[i] + count == len(text)))
                    who.append(i)
                    done[i] += count
            result = self.run(rows=tuple(rows), **parts)
            parts = {}
            if result.errors:
                raise AssertionError(str(result.errors))
            for r, i in enumerate(who):
                found[i] += result.prompt_logprobs.get(r, ())
                found[i] += result.logprobs.get(r, ())
        self.run(frees=tuple(slot + i for i in range(len(texts))))
        return [_scores(entries) for entries in found]


def _scores(entries: list[TokenLogprob]) -> Scores:
    return Scores(
        np.array([[i for i, _ in e.top[:TOP]] for e in entries]),
        np.array([[p for _, p in e.top[:TOP]] for e in entries], np.float32),
    )
