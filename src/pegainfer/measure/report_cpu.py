"""The page of the CPU's kernels: where a step spends its time, what is farthest from its floor, shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pegainfer.measure.ledger import Row, shape_text
from pegainfer.measure.report_text import bound_of, groups_of, matches, table

WORST = 15  # rows in the list of what is farthest from its floor
FELT_US = 100  # of a step, below which no user would notice
# A step at batch 1 with this context, or a prompt of so many tokens: where calls add up.
DECODE = {"T": 1, "L": 1, "R": 1, "C": 128, "Q": 128}
PREFILL = {"T": 512, "R": 1, "C": 512, "Q": 512 * 513 // 2}

HEAD = """# CPU kernels

Made from `src/pegainfer/measure/ledger.jsonl` by `make docs-kernels`; do not edit. `pegainfer bench ops
--append` adds measurements; the newest of each op, variant and shape stands here.

Times are medians of many calls in one program, with weights and KV pages cold and inputs warm, as a step
finds them. The floor of a call is the larger of two times: its bytes over the bandwidth, its arithmetic over
the peak, both measured in the same run on the same threads; *share* is the floor over the time. An op with
weights or KV pages reads from memory; the others read what the step has just written, so caches are their
roof. *Error* is against the op's reference, of what its tolerance allows. Letters are those of `GLOSSARY.md`.
"""


def report(rows: Iterable[Row]) -> str:
    """The page: for each machine and model its ceilings, what is farthest from its floor, and every shape."""
    parts = [HEAD]
    groups = groups_of(rows, "cpu.")
    if not groups:
        parts.append("The ledger has no rows yet.\n")
    for (device, threads, model), group in groups.items():
        parts += [f"## {device}, {threads} threads, {model}\n", _origins(group)]
        for title, sizes in (("a decode step at batch 1", DECODE), ("a prefill of 512 tokens", PREFILL)):
            parts += _step(title, [r for r in group if matches(r, sizes)])
        parts += [_farthest(group), _shapes(group)]
    return "\n".join(parts)


def _origins(rows: list[Row]) -> str:
    """Each run's ceilings and how to repeat it."""
    lines = []
    for row in {r.date: r for r in rows}.values():
        peaks = ", ".join(f"{name} {peak:g}" for name, peak in row.roofline.peaks.items())
        lines.append((
            row.date, row.commit or "–", f"{row.roofline.read_gb_s:g} GB/s",
            f"{row.roofline.cache_gb_s:g} GB/s", f"{peaks} GFLOP/s", f"`{row.command}`",
        ))  # fmt: skip
    return table(("run", "commit", "reads", "caches", "peaks", "command"), lines)


def _step(title: str, rows: list[Row]) -> Iterator[str]:
    """Where a step's time goes: calls times µs."""
    if not rows:
        return
    total = sum(r.calls * r.us for r in rows)
    floor = sum(r.calls * r.floor_us for r in rows)
    yield f"### Where {title} spends its time\n"
    yield f"{total / 1e3:.2f} ms in kernels, floor {floor / 1e3:.2f} ms.\n"
    columns = ("op", "variant", "shape", "calls", "µs a step", "of kernels", "above the floor, µs", "share")
    lines = [
        (
            r.op, r.variant, shape_text(r), str(r.calls), f"{step_us(r):.0f}", f"{step_us(r) / total:.1%}",
            f"{r.calls * (r.us - r.floor_us):.0f}", f"{r.share:.0%}",
        )
        for r in sorted(rows, key=step_us, reverse=True)
    ]  # fmt: skip
    yield table(columns, lines)


def _farthest(rows: list[Row]) -> str:
    """The work list: what takes the most times its floor, of all that a step feels."""
    felt = [r for r in rows if step_us(r) >= FELT_US]
    worst = sorted(felt, key=lambda r: r.share)[:WORST]
    if not worst:
        return ""
    first = f"**{worst[0].op}** at {shape_text(worst[0])}, {1 / worst[0].share:.1f} times its floor"
    head = (
        "### Farthest from their floors\n\n"
        f"Of ops that take a step {FELT_US} µs or more. Farthest: {first}.\n\n"
    )
    lines = [(r.op, r.variant, shape_text(r), f"{step_us(r):.0f}", f"{1 / r.share:.1f}") for r in worst]
    return head + table(("op", "variant", "shape", "µs a step", "× floor"), lines)


def _shapes(rows: list[Row]) -> str:
    """Every row, op by op."""
    columns = (
        "op", "variant", "shape", "µs (p10 – p90)", "GB/s", "GFLOP/s", "bound", "share", "error",
    )  # fmt: skip
    lines = [
        (
            r.op, r.variant, shape_text(r), f"{r.us:.1f} ({r.us_p10:.1f} – {r.us_p90:.1f})", f"{r.gb_s:.1f}",
            f"{r.gflop_s:.1f}", bound_of(r), f"{r.share:.0%}", f"{r.tolerance_share:.0%}",
        )
        for r in rows
    ]  # fmt: skip
    return "### Every shape\n\n" + table(columns, lines)


def step_us(r: Row) -> float:
    """Of all calls in a step."""
    return r.calls * r.us
