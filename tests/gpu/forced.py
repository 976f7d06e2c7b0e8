"""Texts run through a runner plan by plan, in any cut, with log-probabilities after every token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import (
    BlockCopy,
    NewSlot,
    PageGroup,
    Row,
    Runner,
    SlotBlocks,
    StateSnapshot,
    StepPlan,
    StepResult,
)

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
        self._groups = runner.info.kv.groups
        self._block_size = next(g.block_size for g in self._groups if isinstance(g, PageGroup))
        # The last state of each group of states keeps what `keep` leaves for a later `start`.
        self._kept = {
            i: runner.info.num_blocks[i] - 1
            for i, group in enumerate(self._groups)
            if not isinstance(group, PageGroup)
        }

    def run(self, **parts: Any) -> StepResult:
        return self.runner.sample(self.runner.forward(StepPlan(step=next(self._steps), **parts))).wait()

    def blocks(self, first: int, length: int) -> tuple[int, ...]:
        return tuple(range(first, first + -(-(length + 1) // self._block_size)))

    def score(self, text: Array, chunk: int, *, start: int = 0, keep: bool = False) -> Scores:
        """One text alone, `chunk` tokens a step, from `start` on.

        What is before stands in its blocks, and in the states that the call before has kept.

        Args:
            keep: keeps the states behind the text, whose length is a multiple of a block.
        """
        return self.together([text], chunk, start=start, keep=keep)[0]

    def together(
        self, texts: Sequence[Array], chunk: int, *, start: int = 0, keep: bool = False
    ) -> list[Scores]:
        """Texts in neighbouring slots, each `chunk` tokens a step; the slots are freed. See `score`."""
        news, changes, at = [], [], 0
        for i, text in enumerate(texts):
            news.append(
                NewSlot(
                    slot=i, seq=next(self._seq), tokens=pack_tokens(text.tolist()),
                    num_prompt=len(text), sampling=PARAMS, seed=1,
                )
            )  # fmt: skip
            blocks = self.blocks(at, len(text))
            at += len(blocks)
            for group, kind in enumerate(self._groups):  # a slot has the state of its own number
                mine = blocks if isinstance(kind, PageGroup) else (i,)
                changes.append(SlotBlocks(i, group, mine))
        found: list[list[TokenLogprob]] = [[] for _ in texts]
        done = [start] * len(texts)
        parts: dict[str, Any] = {"news": tuple(news), "blocks": tuple(changes)}
        if start:
            parts["copies"] = tuple(BlockCopy(group, kept, 0) for group, kept in self._kept.items())
        while any(d < len(t) for d, t in zip(done, texts, strict=True)):
            rows, who = [], []
            for i, text in enumerate(texts):
                count = min(chunk, len(text) - done[i])
                if count:
                    rows.append(Row(i, done[i], count, done[i] + count == len(text)))
                    who.append(i)
                    done[i] += count
            if keep and done[0] == len(texts[0]):
                parts["snapshots"] = tuple(
                    StateSnapshot(0, group, done[0], kept) for group, kept in self._kept.items()
                )
            result = self.run(rows=tuple(rows), **parts)
            parts = {}
            if result.errors:
                raise AssertionError(str(result.errors))
            for r, i in enumerate(who):
                found[i] += result.prompt_logprobs.get(r, ())
                found[i] += result.logprobs.get(r, ())
        self.run(frees=tuple(range(len(texts))))
        return [_scores(entries) for entries in found]


def _scores(entries: list[TokenLogprob]) -> Scores:
    return Scores(
        np.array([[i for i, _ in e.top[:TOP]] for e in entries]),
        np.array([[p for _, p in e.top[:TOP]] for e in entries], np.float32),
    )
