"""What became slower between two traces: of two builds, or of two machines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pegainfer.contract.trace import STAGES, StepTrace

LEAST_SAMPLES = 5  # of steps of a size, in each trace, so that their medians are compared
LEAST_SHARE = 0.01  # of the time of all ops; what takes less is not named

Size = tuple[int, int]  # decode rows and prefill tokens, by powers of two


class Change(NamedTuple):
    """One op, kind of step, or stage of the host.

    Args:
        before, after: seconds a step: medians of each size of step, averaged over the sizes that both have.
        ratio: after over before.
        relative: the same over the median ratio of all of its kind, so that a machine that is slower
            altogether names nothing.
    """

    name: str
    before: float
    after: float
    ratio: float
    relative: float


def op_changes(before: Sequence[StepTrace], after: Sequence[StepTrace]) -> list[Change]:
    """Every op that both traces have sampled, what has become slower than the others first."""
    return _changes(_op_values(before), _op_values(after))


def step_changes(before: Sequence[StepTrace], after: Sequence[StepTrace]) -> list[Change]:
    """The device's time by kind of step."""
    return _changes(_step_values(before), _step_values(after))


def host_changes(before: Sequence[StepTrace], after: Sequence[StepTrace]) -> list[Change]:
    """The host's stages but for the wait, which follows from the device."""
    return _changes(_host_values(before), _host_values(after))


def regressions(changes: Iterable[Change], threshold: float) -> list[Change]:
    """Those that have become slower by this share or more, beside all others and in themselves."""
    changes = list(changes)
    least = LEAST_SHARE * sum(c.after for c in changes)
    return [c for c in changes if min(c.ratio, c.relative) >= 1.0 + threshold and c.after >= least]


_Values = dict[str, dict[Size, list[float]]]  # seconds, by name and size of step


def _size(step: StepTrace) -> Size:
    return step.decode_rows.bit_length(), step.prefill_tokens.bit_length()


def _op_values(steps: Sequence[StepTrace]) -> _Values:
    values: _Values = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for name, seconds in step.ops.items():
            values[name][_size(step)].append(seconds)
    return values


def _step_values(steps: Sequence[StepTrace]) -> _Values:
    values: _Values = defaultdict(lambda: defaultdict(list))
    for step in steps:
        rows, tokens = _size(step)
        if rows or tokens:
            name = f"step of up to {2**rows - 1} decodes and {2**tokens - 1} prompt tokens"
            values[name][rows, tokens].append(step.device)
    return values


def _host_values(steps: Sequence[StepTrace]) -> _Values:
    values: _Values = defaultdict(lambda: defaultdict(list))
    for step in steps:
        for name, seconds in zip(STAGES, step.stages, strict=True):
            if name != "wait":
                values[f"host: {name}"][_size(step)].append(seconds)
    return values


def _changes(before: _Values, after: _Values) -> list[Change]:
    found = []
    for name in before.keys() & after.keys():
        pairs = [
            (statistics.median(values), statistics.median(after[name][size]))
            for size, values in before[name].items()
            if len(values) >= LEAST_SAMPLES and len(after[name].get(size, ())) >= LEAST_SAMPLES
        ]
        if pairs and all(b > 0.0 for b, _ in pairs):
            then, now = (statistics.fmean(column) for column in zip(*pairs, strict=True))
            found.append((name, then, now, now / then))
    usual = statistics.median([ratio for *_, ratio in found]) if len(found) > 2 else 1.0
    changes = [Change(name, then, now, ratio, ratio / usual) for name, then, now, ratio in found]
    return sorted(changes, key=lambda c: (-c.relative, c.name))
