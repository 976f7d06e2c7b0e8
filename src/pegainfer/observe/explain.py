"""What a slow request waited for: the records of a trace, turned into causes with the seconds that they cost.

A step's time is compared with its price, which the engine learnt from earlier steps, or with the median of
steps of its size where it had none. A request's findings are the lost time of the steps that it took part in,
and the time that it spent before, between and after them.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from pegainfer.contract.observation import RequestRecord
from pegainfer.contract.trace import STAGES, StepTrace

LEAST_STEP_SECONDS = 0.005  # of a step; less is noise
LEAST_SECONDS = 0.05  # of a request
LEAST_SHARE = 0.1  # of a request's time; a cause counts with less, too, where it cost LONG_SECONDS
LONG_SECONDS = 1.0
ALIKE = 5  # steps of a size that a median needs


class Cause(StrEnum):
    """What a request or a step waited for."""

    UPLOAD = "slow upload"
    TEMPLATE = "chat template"
    GRAMMAR = "grammar compile"
    TOKENIZE = "tokenising"
    QUEUE = "queue"
    POOL = "pool pressure"
    PREEMPTION = "preemption"
    TIER = "tier load"
    PREFILL = "prefill beside decodes"
    DEVICE = "slow device"
    CONTENTION = "another process"
    COLD = "cold graph"
    COLLECT = "garbage collection"
    MASK = "grammar masks"
    HOST = "host stall"
    DETOKENIZE = "detokenising"
    FRONT = "blocked front"
    CLIENT = "slow client"


class Finding(NamedTuple):
    """A cause, the seconds that it cost, and a sentence for people."""

    cause: Cause
    seconds: float
    sentence: str


class Loss(NamedTuple):
    """Time that a step lost. `decodes_only`: sequences whose prompt was computed in it lost nothing."""

    step: StepTrace
    cause: Cause
    seconds: float
    sentence: str
    decodes_only: bool = False


def step_losses(steps: Sequence[StepTrace]) -> list[Loss]:
    """What the steps of a trace lost, in order; a step may appear more than once."""
    usual = _Usual(steps)
    following = [*steps[1:], None][: len(steps)]
    return [loss for s, after in zip(steps, following, strict=True) for loss in _losses(s, after, usual)]


class _Usual:
    """What steps of a size take, where they have no price."""

    def __init__(self, steps: Sequence[StepTrace]) -> None:
        groups: dict[tuple[int, int], list[float]] = defaultdict(list)
        for step in steps:
            groups[_size(step)].append(step.device)
        self._medians = {k: statistics.median(v) for k, v in groups.items() if len(v) >= ALIKE}

    def device(self, step: StepTrace) -> float:
        """Seconds; those that the step took where nothing is known."""
        return step.price or self._medians.get(_size(step), step.device)

    def decodes(self, step: StepTrace) -> float | None:
        """Of the step's decode rows alone; None where nothing is known."""
        if step.price:
            return step.decode_price
        return self._medians.get((step.decode_rows.bit_length(), 0))


def _size(step: StepTrace) -> tuple[int, int]:
    return step.decode_rows.bit_length(), step.prefill_tokens.bit_length()


def _losses(s: StepTrace, after: StepTrace | None, usual: _Usual) -> Iterator[Loss]:
    if not (s.decode_rows or s.prefill_rows):
        if s.period >= LEAST_STEP_SECONDS:
            yield Loss(s, Cause.TIER, s.period, f"step {s.step} waited {_ms(s.period)} for a tier")
        return
    expected = usual.device(s)
    alone = usual.decodes(s)
    if s.prefill_tokens and s.decode_rows and alone is not None:
        added = min(expected, s.device) - alone
        if added >= max(2 * LEAST_STEP_SECONDS, alone):
            told = f"step {s.step} computed {s.prefill_tokens} prompt tokens beside {s.decode_rows} decodes"
            yield Loss(s, Cause.PREFILL, added, f"{told}: {_ms(s.device)} instead of {_ms(alone)}", True)
    over = s.device - expected
    if over >= max(LEAST_STEP_SECONDS, expected):
        cause = Cause.CONTENTION if s.starved >= over / 2 else Cause.DEVICE
        told = f"step {s.step} took the device {_ms(s.device)}, its price is {_ms(expected)}"
        yield Loss(s, cause, over, told)
    longest = max(s.device, expected)
    stalled = s.period - longest
    if stalled >= max(LEAST_STEP_SECONDS, longest):
        yield _host_loss(s, after, stalled)


def _host_loss(s: StepTrace, after: StepTrace | None, stalled: float) -> Loss:
    """`after`: the next step, which was launched in this one's period where two plans were in flight."""
    stages = dict(zip(STAGES, s.stages, strict=True))
    stages["wait"] = max(0.0, stages["wait"] - s.device)
    name = max(stages, key=stages.__getitem__)
    half = stalled / 2
    if s.collect >= half:
        return Loss(s, Cause.COLLECT, stalled, f"step {s.step}: {_ms(s.collect)} of garbage collection")
    cold = max(s, after or s, key=lambda step: step.cold)
    if cold.cold >= half:
        told = f"step {cold.step}: {_ms(cold.cold)} to make the graph of its sizes"
        return Loss(s, Cause.COLD, stalled, told)
    if s.starved >= half:
        told = f"step {s.step}: its threads waited {_ms(s.starved)} for processors that others had"
        return Loss(s, Cause.CONTENTION, stalled, told)
    if name == "mask":
        return Loss(s, Cause.MASK, stalled, f"step {s.step}: {_ms(stages[name])} for grammar masks")
    return Loss(
        s, Cause.HOST, stalled, f"step {s.step}: the engine's thread spent {_ms(stages[name])} in '{name}'"
    )


class Explainer:
    """Explains requests of one trace."""

    def __init__(self, steps: Sequence[StepTrace]) -> None:
        self._steps = steps
        self._ends = [s.ended for s in steps]
        self._losses = step_losses(steps)
        self._loss_ends = [loss.step.ended for loss in self._losses]

    def request(self, record: RequestRecord) -> list[Finding]:
        """What cost a request much of its time, the costliest first; none for one that nothing held up."""
        sums: dict[Cause, float] = defaultdict(float)
        told: dict[Cause, tuple[float, str]] = {}
        for cause, seconds, sentence in self._all(record):
            sums[cause] += seconds
            if seconds > told.get(cause, (0.0, ""))[0]:
                told[cause] = seconds, sentence
        found = [Finding(c, s, told[c][1]) for c, s in sums.items() if _counts(s, record.seconds)]
        return sorted(found, key=lambda f: -f.seconds)

    def _all(self, r: RequestRecord) -> Iterator[Finding]:
        yield from _front_findings(r)
        t = r.timings
        if t is None or not t.scheduled:
            return
        yield Finding(Cause.GRAMMAR, t.ready - t.admitted, "the engine compiled its grammar")
        yield self._queued(t.ready, t.scheduled)
        lost = 0.0
        first, last = bisect_right(self._loss_ends, t.scheduled), bisect_right(self._loss_ends, t.finished)
        for loss in self._losses[first:last]:
            if loss.decodes_only and not 0.0 < t.first_token < loss.step.ended:
                continue
            yield Finding(loss.cause, loss.seconds, loss.sentence)
            lost += loss.seconds
        yield from self._gaps(r, lost)

    def _queued(self, begin: float, end: float) -> Finding:
        """The wait for the first step, and what kept others from giving way."""
        steps = self._between(begin, end)
        seconds, free = end - begin, min((s.free_blocks for s in steps), default=-1)
        running = max((s.running for s in steps), default=0)
        waited = f"it waited {_ms(seconds)} for its first step while {running} sequences ran"
        if any(s.loading for s in steps):
            return Finding(Cause.TIER, seconds, f"{waited}, and adapters or prefixes were loaded")
        if any(s.preempted for s in steps) or free == 0:
            return Finding(Cause.POOL, seconds, f"{waited}, with {free} KV blocks free")
        return Finding(Cause.QUEUE, seconds, waited)

    def _gaps(self, r: RequestRecord, lost: float) -> Iterator[Finding]:
        """The longest time between two deliveries, as far as no step explains it."""
        t = r.timings
        assert t is not None
        steps = self._between(t.first_token, t.finished)
        longest = max((s.period for s in steps), default=0.0)
        left = r.gap - 2 * longest
        if left <= 0.0:
            return
        if t.preemptions:
            times = "once" if t.preemptions == 1 else f"{t.preemptions} times"
            yield Finding(
                Cause.PREEMPTION, left, f"it lost its KV blocks {times}; no token came for {_ms(r.gap)}"
            )
        elif r.stages.get("socket", 0.0) < left / 2:
            yield Finding(
                Cause.FRONT, left, f"no token reached the client for {_ms(r.gap)} while the engine made steps"
            )

    def _between(self, begin: float, end: float) -> Sequence[StepTrace]:
        """The steps that ended after `begin`, up to the first one at `end` or later."""
        return self._steps[bisect_right(self._ends, begin) : bisect_left(self._ends, end) + 1]


def _front_findings(r: RequestRecord) -> Iterator[Finding]:
    for stage, cause, told in (
        ("body", Cause.UPLOAD, "its body took {} to arrive"),
        ("template", Cause.TEMPLATE, "its chat took {} to render"),
        ("grammar", Cause.GRAMMAR, "its grammar took {} to check"),
        ("tokenize", Cause.TOKENIZE, "its prompt took {} to tokenise"),
        ("detokenize", Cause.DETOKENIZE, "its answer took {} to become text"),
        ("socket", Cause.CLIENT, "its client took {} to read the answer"),
    ):
        seconds = r.stages.get(stage, 0.0)
        yield Finding(cause, seconds, told.format(_ms(seconds)))
    waited = r.late - r.stages.get("socket", 0.0)
    yield Finding(Cause.FRONT, waited, f"the front took its last token {_ms(r.late)} late")


def _counts(seconds: float, total: float) -> bool:
    return seconds >= LEAST_SECONDS and (seconds >= LEAST_SHARE * total or seconds >= LONG_SECONDS)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"
