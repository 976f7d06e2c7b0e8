"""Where the device's time went: ops by share, and what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.measure.op_prices import ORIGINS, OpPrice, Origin
from pegainfer.measure.prices import PriceList, StepWork


@dataclass(frozen=True)
class OpShare:
    """One op over all steps of a run.

    Args:
        seconds, floor: of the device, and the least that its bytes and FLOPs take.
        bounds: seconds by what sets the floor: memory, compute, launch.
        origin: of the least certain price in it.
    """

    op: str
    seconds: float
    floor: float
    bounds: Mapping[str, float]
    origin: Origin

    @property
    def bound(self) -> str:
        """What bounds most of it."""
        return max(self.bounds, key=self.bounds.__getitem__)


def breakdown(prices: PriceList, works: Mapping[StepWork, int]) -> list[OpShare]:
    """Ops of all steps, the dearest first. `works`: steps and how often each ran."""
    found: dict[str, OpShare] = {}
    for work, times in works.items():
        if not work.samples and not work.chunks:
            continue
        for op in prices.ops(work):
            found[op.op] = _with(found.get(op.op), op, times)
    return sorted(found.values(), key=lambda share: -share.seconds)


def _with(before: OpShare | None, op: OpPrice, times: int) -> OpShare:
    seconds, floor = op.us * times / 1e6, op.floor_us * times / 1e6
    if before is None:
        return OpShare(op.op, seconds, floor, {op.bound: seconds}, op.origin)
    bounds = {**before.bounds, op.bound: before.bounds.get(op.bound, 0.0) + seconds}
    origin = max(before.origin, op.origin, key=ORIGINS.index)
    return OpShare(op.op, before.seconds + seconds, before.floor + floor, bounds, origin)
