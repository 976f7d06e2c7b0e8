"""What the pages made from the ledger share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pegainfer.measure.ledger import Row, newest
from pegainfer.ops.spec import Cost

PLAIN_CASES = ("", "none", "greedy")


def groups_of(rows: Iterable[Row], backend: str) -> dict[tuple[str, int, str], list[Row]]:
    """The newest rows by device, threads and model; `backend` begins their variants."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in newest(rows):
        if row.variant.startswith(backend):
            groups.setdefault((row.device, row.threads, row.model), []).append(row)
    return groups


def matches(row: Row, sizes: Mapping[str, int]) -> bool:
    """Whether the row is part of a step of these sizes; most ops see only its tokens, or its sampled rows."""
    shared = [a for a in row.shape if a in sizes]
    return bool(shared) and all(row.shape[a] == sizes[a] for a in shared) and row.case in PLAIN_CASES


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows]) + "\n"


def bound_of(r: Row) -> str:
    """Which of its roofs a row is under."""
    bytes_us = r.roofline.floor_us(Cost(r.bytes, 0), r.memory, r.arithmetic)
    if 0 < r.roofline.launch_us >= r.floor_us:
        return "launch"
    return {"dram": "memory", "cache": "caches"}[r.memory] if bytes_us >= r.floor_us else r.arithmetic
