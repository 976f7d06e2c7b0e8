"""The price of one op of a program at all sizes, from the ledger's rows of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pegainfer.measure.ledger import STEP_SIZES, Memory, Roofline, Row, memory_of, shape_of
from pegainfer.measure.profile import op_label
from pegainfer.measure.workload import Family
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import Cost

Origin = Literal["measured", "interpolated", "scaled", "roofline"]
Bound = Literal["memory", "compute", "launch"]
Point = tuple[float, ...]  # logarithms of step sizes

ORIGINS: tuple[Origin, ...] = ("measured", "interpolated", "scaled", "roofline")  # the most certain first
NEIGHBOURS = 4  # measurements that a price between several sizes is made of
EXACT = 1e-9  # distance of logarithms below which two shapes are the same


@dataclass(frozen=True)
class OpPrice:
    """All calls of one op in one step.

    Args:
        op: its name, with the widths of its matrix where it has one.
        us, floor_us: microseconds, and the roofline's for the same bytes and FLOPs.
        bound: what sets the floor.
        origin: where the price is from; of several parts the least certain one.
    """

    op: str
    calls: int
    us: float
    floor_us: float
    bound: Bound
    origin: Origin


@dataclass(frozen=True)
class _Sample:
    """One measurement: where it lies, and its time as a multiple of its own floor."""

    sizes: Mapping[str, int]
    at: Point
    us: float
    ratio: float


class OpPrices:
    """One op of a program at all sizes.

    Args:
        call: one of the family's calls, for bytes and FLOPs.
        rows: of this op, its fixed sizes and formats, in the case that is asked for.
        known: what prices at measured sizes are called.
        per_token: it reads no context, so tokens and sampling rows alone set its price.
    """

    def __init__(
        self,
        family: Family,
        call: OpCall,
        rows: Sequence[Row],
        roofline: Roofline,
        arithmetic: str,
        known: Origin,
    ) -> None:
        self.family = family
        self.label = op_label(call)
        self.per_token = "C" not in family.spec.cost_axes and "Q" not in family.spec.cost_axes
        self._call = call
        self._roofline = roofline
        self._memory: Memory = memory_of(family.spec)
        self._arithmetic = arithmetic
        self._known = known
        letters = shape_of(family.spec, family.axes | dict.fromkeys(STEP_SIZES, 1))
        wanted = ("T", "L") if self.per_token else ("T", "L", "R", "C")
        self._axes = tuple(a for a in wanted if a in letters)
        self._samples = sorted((self._sample(row) for row in rows), key=lambda s: s.at)

    def _sample(self, row: Row) -> _Sample:
        us = max(row.cost_us, 1e-3)
        return _Sample(row.shape, self._point(row.shape), us, us / max(self._floor(row.shape)[0], 1e-6))

    def _point(self, sizes: Mapping[str, int]) -> Point:
        return tuple(math.log2(max(sizes.get(a, 0), 0.5)) for a in self._axes)

    def _floor(self, sizes: Mapping[str, int]) -> tuple[float, Bound]:
        cost = self._call.cost({**dict.fromkeys("JEUO", 0), **dict.fromkeys(STEP_SIZES, 1), **sizes})
        whole = self._roofline.floor_us(cost, self._memory, self._arithmetic)
        memory = self._roofline.floor_us(Cost(cost.bytes, 0), self._memory, self._arithmetic)
        compute = self._roofline.floor_us(Cost(0, cost.flops), self._memory, self._arithmetic)
        if whole <= self._roofline.launch_us:
            return whole, "launch"
        return whole, "memory" if memory >= compute else "compute"

    def price(self, sizes: Mapping[str, int], without: int | None = None) -> OpPrice:
        """All calls of a step of these sizes.

        Args:
            sizes: T, R, L, C and Q.
            without: index of a measurement that is left out, to see how well the others predict it.
        """
        floor, bound = self._floor(sizes)
        calls = self.family.calls
        samples = [s for i, s in enumerate(self._samples) if i != without]
        if not samples:
            return OpPrice(self.label, calls, calls * floor, calls * floor, bound, "roofline")
        at = self._point(sizes)
        us, exact = self._between(samples, at, floor)
        origin: Origin = self._known if exact or self._known == "scaled" else "interpolated"
        return OpPrice(self.label, calls, calls * us, calls * floor, bound, origin)

    def _between(self, samples: list[_Sample], at: Point, floor: float) -> tuple[float, bool]:
        """Microseconds of a call, and whether exactly these sizes were measured."""
        if len(self._axes) == 1:
            return _on_line(samples, at[0], floor)
        near = sorted((math.dist(s.at, at), s.ratio, s.us) for s in samples)[:NEIGHBOURS]
        if near[0][0] < EXACT:
            return near[0][2], True
        weights = [1 / distance**2 for distance, _, _ in near]
        mean = sum(w * math.log(ratio) for w, (_, ratio, _) in zip(weights, near, strict=True))
        return floor * math.exp(mean / sum(weights)), False

    def errors(self) -> list[float]:
        """Relative error of measurements' prices by the others: 0.1 is 10% too dear.

        Of sizes on a line, the least and the greatest are left out: there the others would extrapolate.
        """
        inner = range(len(self._samples))
        if len(self._axes) == 1:
            inner = inner[1:-1]
        priced = (self.price(self._samples[i].sizes, without=i).us / self.family.calls for i in inner)
        return [us / self._samples[i].us - 1 for i, us in zip(inner, priced, strict=True)]

    @property
    def measured(self) -> bool:
        return bool(self._samples)


def _on_line(samples: list[_Sample], x: float, floor: float) -> tuple[float, bool]:
    """Between two sizes the time grows in proportion; beyond the ends it keeps its ratio to the floor."""
    places = [s.at[0] for s in samples]
    i = bisect_left(places, x - EXACT)
    if i < len(samples) and abs(places[i] - x) < EXACT:
        return samples[i].us, True
    if i in (0, len(samples)):
        return floor * samples[min(i, len(samples) - 1)].ratio, False
    low, high = samples[i - 1], samples[i]
    share = (2**x - 2 ** low.at[0]) / (2 ** high.at[0] - 2 ** low.at[0])
    return low.us + share * (high.us - low.us), False


def matching(family: Family, rows: Iterable[Row], case: str, arithmetic: str) -> list[Row]:
    """Rows of the same op, fixed sizes, formats and arithmetic; the later of two of the same shape."""
    wanted = {"sample_tokens": case, "adjust_logits": "none"}.get(family.spec.name, "")
    fixed = shape_of(family.spec, family.axes)
    found: dict[tuple[tuple[str, int], ...], Row] = {}
    for row in rows:
        sizes = {a: n for a, n in row.shape.items() if a not in STEP_SIZES}
        same = (row.op, row.case, row.arithmetic) == (family.spec.name, wanted, arithmetic)
        if same and sizes == fixed and row.formats == family.formats:
            found[tuple(sorted(row.shape.items()))] = row
    return list(found.values())
