"""The kernel plan of a model: for each phase its ops, their kernels and files, prices and bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pegainfer.kernels.build import find_sources
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.plan import PlannedLaunch
from pegainfer.lower.cuda.planning import plan_program
from pegainfer.lower.cuda.target import Target
from pegainfer.measure.cards import LIBRARY, PricedDevice
from pegainfer.measure.prices import StepWork
from pegainfer.measure.profile import op_label
from pegainfer.measure.report_text import table
from pegainfer.ops.program import Program

HEAD = """# Kernels of {name}

Made by `make docs-kernels`; do not edit. Kernels are those that a plan chooses for {card}. Prices are those
of `pegainfer simulate` for {priced} ([performance-model.md](../performance-model.md)), all calls of a step
together. *Floor* is the share of a price that the roofline explains. *Price* says where it is from: a price
from the roofline is a lower bound. An op without kernels runs inside a launch of another op.
"""
PHASES = (
    ("Decoding, 1 row at a context of 1,024", StepWork(1, 1024, (), 1)),
    ("Decoding, 64 rows at a context of 1,024", StepWork(64, 65_536, (), 64)),
    ("A prompt of 1,024 tokens", StepWork(0, 0, ((0, 1024),), 1)),
)
NO_OPTIONS = dict.fromkeys("JEUO", 0)  # of sampling


@dataclass(frozen=True)
class PlannedModel:
    """What a page is made of.

    Args:
        name: of the model.
        forward, sampler: as recorded.
        target: the card that kernels are chosen for.
        device: that prices are of.
    """

    name: str
    forward: Program
    sampler: Program
    target: Target
    device: PricedDevice


def kernel_plan(model: PlannedModel) -> str:
    """The page of one model."""
    parts = [HEAD.format(name=model.name, card=model.target.info.name, priced=model.device.name)]
    prices = model.device.prices(model.forward, model.sampler, "greedy")
    for title, work in PHASES:
        kernels = dict(_kernels(model, work))
        lines = []
        for op in prices.ops(work):
            names = kernels.get(op.op, ())
            files = sorted({_file(name) for name in names})
            lines.append(
                (
                    op.op, str(op.calls), " ".join(names) or "–", " ".join(files) or "–", f"{op.us:.0f}",
                    f"{op.floor_us / op.us:.0%}", op.bound, op.origin,
                )
            )  # fmt: skip
        total = prices.seconds(work) * 1e3
        head = ("op", "calls", "kernels of a call", "file", "µs", "floor", "bound by", "price")
        parts.append(f"## {title}: {total:.2f} ms\n\n{table(head, lines)}")
    return "\n".join(parts)


def _kernels(model: PlannedModel, work: StepWork) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each op of a step with the kernels that most of its calls launch."""
    rows = work.rows + len(work.chunks)
    sizes = {"T": work.tokens, "R": rows, "L": work.samples}
    steps = (
        (model.forward, Step(model.target, sizes, not work.chunks)),
        (model.sampler, Step(model.target, {"L": work.samples, **NO_OPTIONS}, False)),
    )
    for program, step in steps:
        found: dict[str, Counter[tuple[str, ...]]] = {}
        calls = iter(program.lowered(keep=keeps_whole).calls)
        plan = plan_program(program, step)
        for (_, launches), replaced in zip(plan.calls, plan.replaces, strict=True):
            names = tuple(p.kernel if isinstance(p, PlannedLaunch) else LIBRARY for p in launches)
            for i in range(replaced):
                found.setdefault(op_label(next(calls)), Counter())[() if i else names] += 1
        for label, counted in found.items():
            yield label, counted.most_common(1)[0][0]


def _file(kernel: str) -> str:
    if kernel == LIBRARY:
        return "the library"
    return next(s.name for s in find_sources() if kernel in s.variants)
