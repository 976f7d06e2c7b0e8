"""Requests that run together in one engine, and how their answers are compared with another engine's."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pegainfer.contract.event import FinishReason, TokenEvent, TokenLogprob
from pegainfer.contract.request import GenerateRequest
from pegainfer.engine.inprocess import InProcessEngine


@dataclass
class Answer:
    """What came for one request, by index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    error: str | None = None


def answer(
    engine: InProcessEngine, batch: list[GenerateRequest], cancelled: Mapping[str, int]
) -> dict[str, Answer]:
    """Runs them together; `cancelled`: after so many events of a request it is cancelled."""
    answers = {r.id: Answer() for r in batch}
    left = dict(cancelled)
    done = threading.Semaphore(0)

    def sink(event: TokenEvent) -> None:
        a = answers[event.request_id]
        a.tokens.setdefault(event.index, []).extend(event.tokens)
        a.logprobs.setdefault(event.index, []).extend(event.logprobs or ())
        a.error = a.error or event.error
        if event.finish is not None:
            a.finish[event.index] = event.finish
            done.release()
        elif event.request_id in left:
            left[event.request_id] -= 1
            if left[event.request_id] == 0:
                engine.cancel(event.request_id)

    for r in batch:
        engine.submit(r, sink)
    for r in batch:
        for _ in range(r.n):
            done.acquire()
    return answers


def compare(got: Answer, want: Answer, tie: float | None) -> list[float]:
    """Gaps of the logits where the tokens part, in nat. A cancelled answer may be shorter.

    Args:
        tie: the largest gap at which tokens may part; None: they never may.

    Raises AssertionError where tokens part otherwise, or where an answer ends in another way.
    """
    gaps = []
    assert got.error is None and want.error is None, (got.error, want.error)
    for index, tokens in got.tokens.items():
        exact, scores = want.tokens[index], want.logprobs[index]
        for at, (g, w) in enumerate(zip(tokens, exact, strict=False)):
            if g != w:
                best = dict(scores[at].top)
                gap = scores[at].logprob - best.get(g, -np.inf)
                assert tie is not None and gap <= tie, (
                    f"token {at} of {index}: {g} for {w}, {gap:.3f} nat below"
                )
                gaps.append(float(gap))
                break
    assert got.finish.keys() == want.finish.keys()
    for index, finish in got.finish.items():
        if finish is FinishReason.LENGTH:
            assert len(got.tokens.get(index, ())) == len(want.tokens[index])
        else:
            assert finish is FinishReason.ABORT, finish
    return gaps
