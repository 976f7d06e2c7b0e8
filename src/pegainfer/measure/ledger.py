"""The kernels' ledger: one JSON line a measurement. Op bench and docs write and read it; `prices`
makes prices of steps from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.ops.spec import STEP_AXES, Cost, OpSpec, Role

LEDGER = Path(__file__).with_name("ledger.jsonl")  # ships with the package
Memory = Literal["dram", "cache"]

STEP_SIZES = STEP_AXES | {"C", "Q"}  # beside operands' axes those that only costs read (OpSpec.cost_axes)
CLOCK_US = 0.02  # what a clock can tell
FORWARD = "forward"  # the op of a row that is a whole step up to the logits


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's ceilings, measured in the same run.

    Args:
        read_gb_s: reading an array that no cache holds, 10⁹ bytes a second.
        cache_gb_s: reading what the step has just written: from the caches of the cores that compute.
        peaks: 10⁹ multiplications and additions a second, by arithmetic: 'f32', 'int8', 'bf16'.
        launch_us: one of many launches that follow each other and do nothing; 0 where a call costs nothing.
    """

    read_gb_s: float
    cache_gb_s: float
    peaks: dict[str, float]
    launch_us: float = 0.0

    def floor_us(self, cost: Cost, memory: Memory, arithmetic: str) -> float:
        """Least microseconds of a call: bytes over the bandwidth, arithmetic over the peak, or a launch."""
        bandwidth = self.read_gb_s if memory == "dram" else self.cache_gb_s
        return max(cost.bytes / bandwidth / 1e3, cost.flops / self.peaks[arithmetic] / 1e3, self.launch_us)

    def best_of(self, other: Roofline) -> Roofline:
        """The better value of each: other work on the machine can only make them worse."""
        return Roofline(
            read_gb_s=max(self.read_gb_s, other.read_gb_s),
            cache_gb_s=max(self.cache_gb_s, other.cache_gb_s),
            peaks={name: max(peak, other.peaks[name]) for name, peak in self.peaks.items()},
            launch_us=min(self.launch_us, other.launch_us),
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One op at one shape on one device.

    Args:
        variant: device, instruction set or architecture, formats, arithmetic: 'cpu.avx512.q4_1.int8',
            'cuda.sm90a.bf16'.
        kernels: that one call launches, by their names in the manifest; empty where the variant says it all.
        case: what else its time depends on: sampling options; empty for most ops.
        shape: axis sizes by letter (GLOSSARY.md), without OpSpec.idle, with OpSpec.cost_axes.
        formats: storage of each operand that has more than one.
        device: the processor's or card's name.
        threads: 0 on a GPU.
        source: hash of the kernel's sources.
        error: largest |got - reference|.
        tolerance_share: the largest share of what the op's tolerance allows, anywhere.
        us, us_p10, us_p90: median and spread of `samples` calls, microseconds.
        memory: where the op's bytes come from in a step.
        arithmetic: a key of the roofline's peaks.
        calls: of this op in one step of `model`.
        step_us, step_kernels: microseconds that a call adds to a whole step of these sizes, where it overlaps
            with the one before it, and its kernels there; None where a step adds exactly `us`.
        date: UTC, ISO 8601.
    """

    op: str
    variant: str
    kernels: tuple[str, ...] = ()
    case: str = ""
    shape: dict[str, int]
    formats: dict[str, str]
    device: str
    threads: int
    source: str
    error: float
    tolerance_share: float
    us: float
    us_p10: float
    us_p90: float
    samples: int
    bytes: int
    flops: int
    memory: Memory
    arithmetic: str
    roofline: Roofline
    model: str
    calls: int
    step_us: float | None = None
    step_kernels: tuple[str, ...] = ()
    commit: str | None
    command: str
    date: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that a later measurement of the same thing has in common with this one."""
        sizes = tuple(sorted(self.shape.items()))
        return self.device, self.threads, self.op, self.variant, self.case, sizes, self.calls, self.model

    @property
    def gb_s(self) -> float:
        return self.bytes / max(self.us, CLOCK_US) / 1e3

    @property
    def gflop_s(self) -> float:
        return self.flops / max(self.us, CLOCK_US) / 1e3

    @property
    def floor_us(self) -> float:
        return self.roofline.floor_us(Cost(self.bytes, self.flops), self.memory, self.arithmetic)

    @property
    def share(self) -> float:
        """Of the roofline: 1 is as fast as the machine allows."""
        return self.floor_us / max(self.us, CLOCK_US)

    @property
    def cost_us(self) -> float:
        """Of a call in a step, where that was measured, else by itself."""
        return self.us if self.step_us is None else self.step_us


def memory_of(spec: OpSpec) -> Memory:
    """Weights, KV pages and recurrent states come from memory in each step; activations were just written."""
    floats = [o for o in spec.operands if o.role is Role.STATE and "f32" in o.dtypes]
    return "dram" if floats or any(o.role is Role.WEIGHT for o in spec.operands) else "cache"


def shape_of(spec: OpSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a row of this op names."""
    letters = {a for o in spec.operands for a in o.axes if not a.isdigit()}
    letters |= set(spec.cost_axes)
    return {a: sizes[a] for a in sorted(letters - set(spec.idle)) if a in sizes}


def shape_text(row: Row) -> str:
    """Sizes of the step, then the rest, then the case: 'T=8 · K=576 N=576 · greedy'."""
    step = " ".join(f"{a}={n}" for a, n in row.shape.items() if a in STEP_SIZES and (n or a in "TL"))
    fixed = " ".join(f"{a}={n}" for a, n in row.shape.items() if a not in STEP_SIZES)
    return " · ".join(part for part in (step, fixed, row.case) if part)


def append(rows: Iterable[Row], path: Path = LEDGER) -> None:
    """Adds rows at the end, with derived rates for readers of the file."""
    lines = []
    for row in rows:
        derived = {n: getattr(row, n) for n in ("gb_s", "gflop_s", "floor_us", "share")}
        figures = {n: float(f"{v:.4g}") for n, v in derived.items()}
        lines.append(msgspec.json.encode(msgspec.to_builtins(row) | figures).decode())
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.writelines(line + "\n" for line in lines)


def read(path: Path = LEDGER) -> list[Row]:
    """All rows, oldest first; none where the file is missing. Raises ConfigError for a bad line."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.DecodeError as e:
            raise ConfigError(f"not a row of the ledger: {e}", where=f"{path}:{number}") from None
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each key, in the order in which keys first came up."""
    return list({row.key: row for row in rows}.values())
