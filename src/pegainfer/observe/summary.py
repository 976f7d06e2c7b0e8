"""The causes of a whole trace: what its requests waited for, added up."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from pegainfer.contract.observation import RequestRecord
from pegainfer.contract.trace import STAGES, StepTrace
from pegainfer.observe.explain import Cause, Explainer, Finding


class CauseSum(NamedTuple):
    """A cause over several requests.

    Args:
        share: of the requests' summed time.
        worst: the request that it cost most, and what is said of it there.
    """

    cause: Cause
    seconds: float
    share: float
    requests: int
    worst: RequestRecord
    sentence: str


def cause_sums(steps: list[StepTrace], requests: list[RequestRecord]) -> list[CauseSum]:
    """Causes with the time that they cost all requests, the costliest first; none where nothing was slow."""
    explainer, total = Explainer(steps), sum(r.seconds for r in requests)
    found: dict[Cause, list[tuple[Finding, RequestRecord]]] = defaultdict(list)
    for record in requests:
        for finding in explainer.request(record):
            found[finding.cause].append((finding, record))
    sums = []
    for cause, entries in found.items():
        seconds = sum(f.seconds for f, _ in entries)
        finding, record = max(entries, key=lambda e: e[0].seconds)
        sums.append(CauseSum(cause, seconds, seconds / total, len(entries), record, finding.sentence))
    return sorted(sums, key=lambda s: -s.seconds)


def phases(r: RequestRecord) -> list[tuple[str, float]]:
    """Where a request's time went, in order: name, seconds."""
    t = r.timings
    shown = [(name, r.stages.get(name, 0.0)) for name in ("body", "template", "grammar", "tokenize")]
    if t is not None and t.scheduled:
        end = t.first_token or t.finished
        shown += [
            ("grammar in the engine", t.ready - t.admitted),
            ("queue", t.scheduled - t.ready),
            ("prefill", end - t.scheduled),
            ("decode", t.finished - end),
        ]
    shown += [(name, r.stages.get(name, 0.0)) for name in ("detokenize", "socket")]
    return [(name, seconds) for name, seconds in shown if seconds > 0.0]


def step_means(steps: list[StepTrace]) -> list[tuple[str, float]]:
    """Mean seconds of a step: its period, the device, its price, and the host's stages."""
    if not steps:
        return []
    count = len(steps)
    means = [
        ("period", sum(s.period for s in steps) / count),
        ("device", sum(s.device for s in steps) / count),
    ]
    priced = [s.price for s in steps if s.price]
    if priced:
        means.append(("price", sum(priced) / len(priced)))
    return means + [(f"host: {n}", sum(s.stages[i] for s in steps) / count) for i, n in enumerate(STAGES)]
