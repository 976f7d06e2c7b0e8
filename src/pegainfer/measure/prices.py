"""The ledger as a price list: what a step of a recorded program costs on a card, op by op.

A price is measured at exactly these sizes, interpolated between measured ones, scaled from another card, or
taken from the roofline where nothing was measured. It always says which. docs/performance-model.md tells how
prices compose and how far off they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec

from pegainfer.measure.ledger import FORWARD, Roofline, Row, newest
from pegainfer.measure.op_prices import ORIGINS, OpPrice, OpPrices, Origin, matching
from pegainfer.measure.workload import Family, families, family_key
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Cost

Pad = Callable[[int, int, bool], tuple[int, int]]  # (tokens, rows, only decodes) -> sizes that are launched

SAME_BYTES = 0.02  # share by which two lowerings of one model may differ
SAMPLING = frozenset({"adjust_logits", "sample_tokens", "append_tokens"})  # what follows a forward pass


@dataclass(frozen=True)
class StepWork:
    """What a step computes.

    Args:
        rows: sequences with one token each, all of which sample.
        context: tokens that these rows read, summed, their own included.
        chunks: (tokens before it, tokens computed) of each prompt's chunk.
        samples: rows that sample, chunks that end their prompt included.
    """

    rows: int
    context: int
    chunks: tuple[tuple[int, int], ...]
    samples: int

    @property
    def tokens(self) -> int:
        return self.rows + sum(count for _, count in self.chunks)


@dataclass(frozen=True)
class Gap:
    """An op whose price is not a measurement of this card, and how often a step calls it."""

    op: str
    calls: int
    origin: Origin


def scaled(rows: Iterable[Row], roofline: Roofline, device: str) -> list[Row]:
    """Rows of one card as another one would have them: the same multiple of the other card's floor."""
    out = []
    for row in rows:
        floor = roofline.floor_us(Cost(row.bytes, row.flops), row.memory, row.arithmetic)
        ratio = floor / row.floor_us
        step_us = None if row.step_us is None else row.step_us * ratio
        out.append(
            msgspec.structs.replace(row, us=row.us * ratio, step_us=step_us, roofline=roofline, device=device)
        )
    return out


class PriceList:
    """Prices of a model's steps on one device. Not thread safe: prices are kept."""

    def __init__(
        self,
        forward: Program,
        sampler: Program,
        rows: Iterable[Row],
        roofline: Roofline,
        *,
        arithmetic: Callable[[Family], str],
        case: str = "greedy",
        known: Origin = "measured",
        pad: Pad = lambda tokens, rows, decode: (tokens, rows),
    ) -> None:
        """
        Args:
            forward, sampler: lowered for the device.
            rows: of one device and thread count.
            arithmetic: a key of the roofline's peaks, by op.
            case: of sampling: a name among `sample_tokens`'s settings.
            known: what prices at measured sizes are called: 'scaled' for rows of another card.
            pad: sizes that a step is launched at.
        """
        self._pad = pad
        rows = newest(rows)
        calls = {family_key(c): c for p in (forward, sampler) for c in p.calls}
        made = [
            OpPrices(f, calls[f.key], matching(f, rows, case, arithmetic(f)), roofline, arithmetic(f), known)
            for f in families([forward, sampler])
            if f.spec.name != "token_logprobs"  # requests that ask for them are not simulated
        ]
        self._fixed = [op for op in made if op.per_token]
        self._reading = [op for op in made if not op.per_token]
        self._ops = made
        self._passes = [row for row in rows if row.op == FORWARD and _is_pass_of(forward, row)]
        self._kept: dict[tuple[int, int, int], tuple[OpPrice, ...]] = {}
        self._chunks: dict[tuple[int, int], tuple[OpPrice, ...]] = {}

    def seconds(self, work: StepWork) -> float:
        """Of the device, from the first launch to the last token drawn."""
        return self._pass_factor(work) * sum(op.us for op in self._parts(work)) / 1e6

    def ops(self, work: StepWork) -> list[OpPrice]:
        """The step by op, the dearest first; they add up to `seconds`."""
        factor, found = self._pass_factor(work), dict[str, OpPrice]()
        for part in self._parts(work):
            seen = found.get(part.op)
            us, floor = part.us * factor, part.floor_us
            origin = part.origin
            if seen is not None:
                us, floor = us + seen.us, floor + seen.floor_us
                origin = max(origin, seen.origin, key=ORIGINS.index)
            found[part.op] = OpPrice(part.op, part.calls, us, floor, part.bound, origin)
        return sorted(found.values(), key=lambda op: -op.us)

    def gaps(self) -> list[Gap]:
        """Ops that the ledger has no row of on this device."""
        return [Gap(op.label, op.family.calls, "roofline") for op in self._ops if not op.measured]

    def interpolation_errors(self) -> dict[str, list[float]]:
        """By op: how far each measurement lies from the price that its neighbours give."""
        return {op.label: errors for op in self._ops if (errors := op.errors())}

    def _parts(self, work: StepWork) -> Iterable[OpPrice]:
        decode = not work.chunks
        tokens, rows = self._pad(work.tokens, work.rows + len(work.chunks), decode)
        key = (tokens, rows, work.samples)
        if key not in self._kept:
            sizes = {"T": tokens, "R": rows, "L": work.samples, "C": work.context, "Q": 0}
            self._kept[key] = tuple(op.price(sizes) for op in self._fixed)
        yield from self._kept[key]
        if work.rows:
            sizes = {"T": work.rows, "R": work.rows, "L": work.rows, "C": work.context, "Q": work.context}
            for op in self._reading:
                yield op.price(sizes)
        for chunk in work.chunks:
            yield from self._chunk(chunk)

    def _chunk(self, chunk: tuple[int, int]) -> tuple[OpPrice, ...]:
        if chunk not in self._chunks:
            start, count = chunk
            pairs = count * start + count * (count + 1) // 2
            sizes = {"T": count, "R": 1, "L": 1, "C": start + count, "Q": pairs}
            self._chunks[chunk] = tuple(op.price(sizes) for op in self._reading)
        return self._chunks[chunk]

    def _pass_factor(self, work: StepWork) -> float:
        """How much less a pass that is one launch takes than its ops one after the other; else 1."""
        if work.tokens != 1 or not self._whole_passes:
            return 1.0
        near = sorted((abs(math.log2(c / max(work.context, 1))), f) for c, f in self._whole_passes)[:2]
        weights = [1 / (d + 1e-9) for d, _ in near]
        return sum(w * f for w, (_, f) in zip(weights, near, strict=True)) / sum(weights)

    @cached_property
    def _whole_passes(self) -> list[tuple[int, float]]:
        """(context, factor) of each measured pass of one row that names a kernel of its own."""
        out = []
        for row in self._passes:
            if row.kernels and row.shape["T"] == 1:
                context = row.shape["C"]
                parts = self._parts(StepWork(1, context, (), 1))
                names = {op.label for op in self._ops if op.family.spec.name in SAMPLING}
                us = sum(p.us for p in parts if p.op not in names)
                out.append((context, row.us / us))
        return out


def _is_pass_of(forward: Program, row: Row) -> bool:
    """Whether a measured pass was one of this model, which the ledger may know by another name."""
    return abs(forward.cost(row.shape).bytes - row.bytes) <= SAME_BYTES * row.bytes
