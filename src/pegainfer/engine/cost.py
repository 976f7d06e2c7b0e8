"""What a step costs, learnt from the engine's own finished steps.

    seconds = a + b · prefill tokens + c · decode rows + d · context of the decode rows + e · prefill pairs

A pair is a query token and a key that it reads. The five weights are a least-squares fit of relative errors,
none below zero, over recent steps. Steps that only decode and steps with a prefill are summed apart, each
forgetting its own past, so that an hour of decoding does not wash out what a prefill costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from pegainfer.contract.step import Row

# Units of the features, so that the fit's sums are of one magnitude.
_UNITS = (1.0, 256.0, 16.0, 16384.0, 65536.0)
_SIZE = len(_UNITS)
MEMORY = 0.95  # weight of the past at each observation: some 20 steps of a kind count
_RIDGE = 1e-7  # of the mean diagonal: decides between features that always came together
PRICE_PERIOD = 8  # observations after which a price is made from a new fit
LEAST_OBSERVED = 10  # steps of a kind that must have been observed before one of that kind has a price
DECODE_PERIOD = 8  # of steps that only decode, one in so many is observed: they hardly differ


class StepLoad(NamedTuple):
    """What a plan asks of the device."""

    prefill_tokens: int = 0
    decode_rows: int = 0
    context: int = 0  # positions that the decode rows read, summed
    pairs: int = 0  # query tokens times the keys they read, of the prefill rows


def prefill_pairs(start: int, count: int) -> int:
    """Pairs of a chunk of `count` tokens after `start` others."""
    return count * start + count * (count + 1) // 2


def load_of(rows: Iterable[Row]) -> StepLoad:
    """What a plan's rows ask of the device.

    A prompt's last token alone counts as a decode row, which costs the same.
    """
    tokens = decodes = context = pairs = 0
    for row in rows:
        if row.sample and row.count == 1:
            decodes += 1
            context += row.start + 1
        else:
            tokens += row.count
            pairs += prefill_pairs(row.start, row.count)
    return StepLoad(tokens, decodes, context, pairs)


class _Sums:
    """Decaying sums of the normal equations."""

    def __init__(self) -> None:
        self.products = [[0.0] * _SIZE for _ in range(_SIZE)]
        self.totals = [0.0] * _SIZE
        self.count = 0  # observations

    def add(self, x: list[float]) -> None:
        """An observation x · weights = 1."""
        self.count += 1
        for i, row in enumerate(self.products):
            xi = x[i]
            self.totals[i] = MEMORY * self.totals[i] + xi
            for j in range(_SIZE):
                row[j] = MEMORY * row[j] + xi * x[j]


class StepCost:
    """The fit. Knows nothing until a step was observed: then every price is 0."""

    def __init__(self) -> None:
        self._decodes = _Sums()
        self._prefills = _Sums()
        self._weights = [0.0] * _SIZE
        self._unsolved = 0  # observations that the weights do not know

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Takes a finished step's time; one without a time tells nothing."""
        if seconds <= 0.0 or not math.isfinite(seconds):
            return
        features = (1.0, *load)
        x = [value / unit / seconds for value, unit in zip(features, _UNITS, strict=True)]
        (self._prefills if load.prefill_tokens else self._decodes).add(x)
        self._unsolved += 1

    def decodes(self, rows: int, context: int) -> float:
        """Seconds of a step that only decodes."""
        w = self._solved()
        return w[0] + w[2] * rows / _UNITS[2] + w[3] * context / _UNITS[3]

    def prefill(self, start: int, count: int) -> float:
        """Seconds that a chunk adds to a step."""
        w = self._solved()
        return w[1] * count / _UNITS[1] + w[4] * prefill_pairs(start, count) / _UNITS[4]

    def price(self, load: StepLoad) -> tuple[float, float]:
        """Seconds of a step, and of its decode rows alone; 0 while too few of its kind were observed.

        The weights may be PRICE_PERIOD observations old, since a new fit takes some 0.1 ms.
        """
        sums = self._prefills if load.prefill_tokens else self._decodes
        if sums.count < LEAST_OBSERVED:
            return 0.0, 0.0
        w = self._solved() if self._unsolved >= PRICE_PERIOD else self._weights
        parts = [weight * value / unit for weight, value, unit in zip(w, (1.0, *load), _UNITS, strict=True)]
        return sum(parts), parts[0] + parts[2] + parts[3]

    def tokens_within(self, seconds: float, start: int) -> int | None:
        """The longest chunk after `start` tokens that adds at most `seconds`; None: any."""
        w = self._solved()
        pair = w[4] / _UNITS[4]
        linear = w[1] / _UNITS[1] + pair * (start + 0.5)
        if linear <= 0.0:
            return None
        if seconds <= 0.0:
            return 0
        # linear · n + pair / 2 · n² = seconds, in the form that loses no digits for a small pair
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * pair * seconds)))

    def _solved(self) -> list[float]:
        if self._unsolved:
            self._unsolved = 0
            both = (self._decodes, self._prefills)
            products = [[sum(s.products[i][j] for s in both) for j in range(_SIZE)] for i in range(_SIZE)]
            self._weights = _solve_positive(products, [sum(s.totals[i] for s in both) for i in range(_SIZE)])
        return self._weights


def _solve_positive(products: list[list[float]], totals: list[float]) -> list[float]:
    """Least squares without negative weights: the most negative is left out until none is."""
    size = len(totals)
    ridge = _RIDGE * sum(products[i][i] for i in range(size)) / size
    kept = [i for i in range(size) if products[i][i] > 0.0]
    while kept:
        matrix = [[products[i][j] + (ridge if i == j else 0.0) for j in kept] for i in kept]
        found = _solve(matrix, [totals[i] for i in kept])
        lowest = min(range(len(kept)), key=found.__getitem__)
        if found[lowest] >= 0.0:
            weights = [0.0] * size
            for i, value in zip(kept, found, strict=True):
                weights[i] = value
            return weights
        del kept[lowest]
    return [0.0] * size


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss without pivoting, which a positive definite matrix does not need. Changes both arguments."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, size))) / matrix[i][i]
    return right
