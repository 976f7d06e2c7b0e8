"""The page of the CUDA kernels: where steps spend their time, what is worst, which kernel runs where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pegainfer.kernels.build import Source, find_sources
from pegainfer.measure.ledger import FORWARD, Row, shape_text
from pegainfer.measure.report_text import bound_of, groups_of, matches, table

WORST = 25  # rows in the work list
AFTERWARDS = frozenset({"adjust_logits", "sample_tokens", "token_logprobs", "append_tokens"})  # the sampler's
# Steps whose time is laid out op by op, by their rows, tokens and context.
STEPS = (
    ("Decoding, 1 row at a context of 1,024", 1, 1, 1024),
    ("Decoding, 64 rows at a context of 1,024", 64, 64, 65_536),
    ("Decoding, 256 rows at a context of 1,024", 256, 256, 262_144),
    ("A prompt of 1,024 tokens", 1, 1024, 1024),
    ("2,048 tokens over 6,144 cached ones", 1, 2048, 8192),
)

HEAD = """# CUDA kernels

Made from `src/pegainfer/measure/ledger.jsonl` and the kernels' declarations by `make docs-kernels`; do not
edit. `pegainfer bench ops MODEL --device cuda --append` adds measurements; the newest of each op, variant and
shape stands here.

*Alone*: medians of many calls of one op after each other in a graph, weights and KV pages cold. *In a
step*: the time that a call adds to a forward pass of these sizes. It is the time of all layers up to this
op in each layer, minus the time up to the op before it; these parts add up to the pass. `–` where only the
pass as a whole was timed. The two figures differ. Alone, an op follows calls of the same op: a GEMM starts
with its norm's launch, and the prefetch of its weights overlaps only with a launch as short as itself. In a
step, a GEMM gets its norm's sums from the GEMM before it, and the copies of its weights are in flight while
attention or a longer GEMM still runs. So decoding takes less time than the sum of its ops alone. A pass
that is one launch has no parts; its ops are listed as they run where no such launch serves a model. The
first op's part includes the start of the graph. The launches that make a step's inputs and attention's work
list, one each, are in no part. Long prompts heat the card, which then lowers its clock: a pass may take
more time than its ops alone, and each part is the difference of two passes at different clocks. Parts of
such steps are therefore accurate to about 10% only, and one may even appear to be below its floor. Sampling
runs after the forward pass and is timed alone.

The *floor* of a call is the largest of its bytes over the bandwidth, its arithmetic over the peak, and the
time between two launches that do nothing, all measured in the same run. *Share* is the floor over the time;
*lost* is the time above the floor of all calls in a step, from *in a step* where that was measured, else
from *alone*. An op with weights or KV pages reads from memory; the others read recent results of the step,
from the L2 cache while they fit. *Error* is against the op's reference, of what its tolerance or bf16's
rounding allows. Letters are those of `GLOSSARY.md`.
"""


def report(rows: Iterable[Row], sources: Iterable[Source] | None = None) -> str:
    """For each card and model its steps, its work list and every shape; then the kernels by op."""
    parts = [HEAD]
    groups = groups_of(rows, "cuda.")
    if not groups:
        parts.append("The ledger has no rows yet.\n")
    for (device, _, model), group in groups.items():
        parts += [f"## {device}, {model}\n", _origins(group)]
        for title, *sizes in STEPS:
            parts += _step(title, group, *sizes)
        parts += [_worst(group), _shapes(group)]
    parts.append(_kernels(find_sources() if sources is None else sources))
    return "\n".join(parts)


def _origins(rows: list[Row]) -> str:
    """Each run's ceilings and how to repeat it."""
    columns = ("run", "commit", "reads", "caches", "peaks", "a launch", "command")
    lines = []
    for row in {r.date: r for r in rows}.values():
        roof = row.roofline
        peaks = ", ".join(f"{name} {peak / 1e3:.0f}" for name, peak in roof.peaks.items())
        lines.append((
            row.date, row.commit or "–", f"{roof.read_gb_s / 1e3:.2f} TB/s",
            f"{roof.cache_gb_s / 1e3:.2f} TB/s", f"{peaks} TFLOP/s", f"{roof.launch_us:.2f} µs",
            f"`{row.command}`",
        ))  # fmt: skip
    return table(columns, lines)


def _step(title: str, group: list[Row], rows: int, tokens: int, context: int) -> Iterator[str]:
    """Where one step's time goes, most time lost first."""
    sizes = {"T": tokens, "R": rows, "L": rows, "C": context}
    found = [r for r in group if matches(r, sizes)]
    whole = next((r for r in found if r.op == FORWARD), None)
    if whole is None:
        return
    ops = [r for r in found if r.op != FORWARD]
    within = [r for r in ops if r.op not in AFTERWARDS]
    floor, alone = sum(r.calls * r.floor_us for r in within), sum(r.calls * r.us for r in within)
    yield f"### {title}\n"
    once = f", one launch ({kernels_text(whole)})" if whole.kernels else ""
    yield (
        f"Forward pass {whole.us / 1e3:.2f} ms{once}; its ops alone add up to {alone / 1e3:.2f} ms, their "
        f"floors to {floor / 1e3:.2f} ms ({floor / whole.us:.0%} of the pass). Then sampling.\n"
    )
    lines = [
        (
            r.op, kernels_text(r), shape_text(r), str(r.calls), f"{r.floor_us:.1f}", f"{r.us:.1f}",
            *in_step(r), f"{lost_us(r):.0f}", percent(r, r.us),
        )
        for r in sorted(ops, key=lost_us, reverse=True)
    ]  # fmt: skip
    columns = (
        "op", "kernels", "shape", "calls", "floor, µs", "alone, µs", "in a step, µs", "share there",
        "lost in a step, µs", "share alone",
    )  # fmt: skip
    yield table(columns, lines)


def _worst(rows: list[Row]) -> str:
    """The work list: what steps lose the most on, of all shapes."""
    once = [r for r in rows if r.op == FORWARD and r.kernels]
    apart = [r for r in rows if r.op != FORWARD and not any(_within(r, whole) for whole in once)]
    ops = sorted(once + apart, key=lost_us, reverse=True)[:WORST]
    lines = [
        (r.op, kernels_text(r), shape_text(r), f"{lost_us(r):.0f}", percent(r, r.cost_us)) for r in ops
    ]  # fmt: skip
    head = f"### Worst first\n\nThe {WORST} shapes on which a step loses the most to its floor.\n\n"
    return head + table(("op", "kernels", "shape", "lost in a step, µs", "share"), lines)


def _shapes(rows: list[Row]) -> str:
    """Every row, op by op."""
    columns = (
        "op", "kernels", "shape", "floor, µs", "alone, µs (p10 – p90)", "GB/s", "TFLOP/s", "bound",
        "share alone", "in a step, µs", "share there", "error",
    )  # fmt: skip
    lines = [
        (
            r.op, kernels_text(r), shape_text(r), f"{r.floor_us:.1f}",
            f"{r.us:.1f} ({r.us_p10:.1f} – {r.us_p90:.1f})", f"{r.gb_s:.0f}", f"{r.gflop_s / 1e3:.1f}",
            bound_of(r), percent(r, r.us), *in_step(r), f"{r.tolerance_share:.0%}",
        )
        for r in rows
    ]  # fmt: skip
    return "### Every shape\n\n" + table(columns, lines)


def _within(r: Row, whole: Row) -> bool:
    """Whether a step that is one launch does what this op does."""
    return r.op not in AFTERWARDS and matches(r, whole.shape)


def lost_us(r: Row) -> float:
    """Above the floor, of all calls in a step."""
    return r.calls * max(0.0, r.cost_us - r.floor_us)


def in_step(r: Row) -> tuple[str, str]:
    """Microseconds and share in a step."""
    return ("–", "–") if r.step_us is None else (f"{r.step_us:.1f}", percent(r, r.step_us))


def percent(r: Row, us: float) -> str:
    """Of the floor; what overlaps wholly with others costs nothing."""
    return "hidden" if us <= 0 else f"{r.floor_us / us:.0%}"


def kernels_text(r: Row) -> str:
    """As a step launches them, where that was seen."""
    return " ".join(f"`{k}`" for k in r.step_kernels or r.kernels) or "–"


def _kernels(sources: Iterable[Source]) -> str:
    """What there is to choose from, as the sources declare it."""
    declared: dict[str, tuple[tuple[str, ...], dict[str, dict[str, str]]]] = {}
    for s in sources:
        declared.setdefault(s.name.split(":")[0], (s.ops, {}))[1].update(s.variants)
    lines = [(f"`{file}`", ", ".join(ops), _features(variants)) for file, (ops, variants) in declared.items()]
    head = "Sources under `common/` serve all architectures, `sm90/` the H100 and H200."
    return f"## Kernels\n\n{head}\n\n" + table(("source", "ops", "kernels, and what they are for"), lines)


def _features(variants: dict[str, dict[str, str]]) -> str:
    """'`rms_norm_bf16`: dtype bf16' of one; of several, how many and every value that a feature takes."""
    values: dict[str, dict[str, None]] = {}
    for features in variants.values():
        for key, value in features.items():
            values.setdefault(key, {})[value] = None
    said = ", ".join(f"{key} {' '.join(found)}" for key, found in values.items())
    first = next(iter(variants))
    who = f"`{first}`" if len(variants) == 1 else f"{len(variants)}, `{first}` and others"
    return f"{who}: {said}" if said else who
