"""pegainfer bench ops: every op of a model's step alone, at the shapes of decode and prefill."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.cli.spec import EngineSpec
    from pegainfer.kernels.cpu.backend import CpuOptions
    from pegainfer.kernels.cpu.opbench import Timing
    from pegainfer.kernels.ledger import Roofline, Row
    from pegainfer.kernels.workload import Family, StepShape
    from pegainfer.ops.check import Report

FLAGS = ("--threads", "--isa", "--activation-dtype", "--kv-cache-dtype")  # of EngineConfig, that matter here


@dataclass(frozen=True, kw_only=True)
class OpsBenchFlags:
    """Raises ConfigError for a ledger that nothing is appended to."""

    op: tuple[str, ...] = field(default=(), metadata={"help": "Only this op; may be repeated."})
    append: bool = field(default=False, metadata={"help": "Append the rows to the ledger."})
    ledger: str = field(default="", metadata={"help": "File of the ledger; default: the package's own."})

    def __post_init__(self) -> None:
        if self.ledger and not self.append:
            raise ConfigError("--ledger does nothing alone", remedy="add --append")


def ops(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: OpsBenchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    given: Given,
) -> int:
    """Time each op at the shapes of decode and prefill, beside what the machine could do at the most.

    Medians of many calls, weights and KV pages cold, inputs warm, as a step finds them; the error is against
    the op's reference. Weights are seeded; of the model, only the sizes and formats count.
    """
    from pegainfer.kernels import ledger
    from pegainfer.kernels.cpu.backend import CpuOptions
    from pegainfer.kernels.cpu.threads import usable_cores

    if flags.device != "cpu":
        raise UnsupportedError("ops are benched on the CPU", expected="--device cpu", got=flags.device)
    given.refuse(EngineConfig, "bench ops", but=FLAGS)
    target = choose(model, flags, engine, SchedulerConfig(), given)
    options = CpuOptions(
        threads=engine.threads or usable_cores(),
        isa=engine.isa,
        activation="f32" if engine.activation == "f32" else "int8",
    )
    origin = _Origin.here(target.spec.name, options)
    measured, roofline = _measure(_plan(target.spec, bench.op), options)
    rows = [origin.row(m, roofline) for m in measured]
    _print(rows, roofline)
    faults = [f"{m.report.label}: {fault}" for m in measured for fault in m.report.faults]
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    if bench.append and not faults:
        path = Path(bench.ledger) if bench.ledger else ledger.LEDGER
        ledger.append(rows, path)
        print(f"{len(rows)} rows appended to {path}")
    return 1 if faults else 0


Plan = list[tuple["Family", tuple["StepShape", ...]]]


def _plan(spec: EngineSpec, wanted: tuple[str, ...]) -> Plan:
    """The model's calls and their shapes. Raises ConfigError for an op that it does not have."""
    from pegainfer.cli.plan import step_programs
    from pegainfer.kernels.cpu.lower import lowered
    from pegainfer.kernels.workload import families

    programs = step_programs(spec)
    found = families([lowered(programs.forward), lowered(programs.sampler)])
    names = list(dict.fromkeys(f.spec.name for f in found))
    if unknown := sorted(set(wanted) - set(names)):
        raise ConfigError("no such op in this model's step", expected=" ".join(names), got=" ".join(unknown))
    longest = programs.info.max_model_len
    return [(f, f.step_shapes(longest)) for f in found if not wanted or f.spec.name in wanted]


@dataclass(frozen=True)
class _Measured:
    """One op at one shape under one option."""

    family: Family
    case: str
    timing: Timing
    report: Report


def _measure(plan: Plan, options: CpuOptions) -> tuple[list[_Measured], Roofline]:
    """All shapes and options of all families; the machine's ceilings before and after, the better ones."""
    from pegainfer.cli.progress import counted_progress
    from pegainfer.kernels.cpu.opbench import FamilyBench
    from pegainfer.kernels.cpu.roofline import measure_roofline

    measured: list[_Measured] = []
    before = measure_roofline(options.threads, options.isa)
    with counted_progress(sum(len(shapes) * len(f.options()) for f, shapes in plan)) as progress:
        for family, shapes in plan:
            bench = FamilyBench(family, shapes, options)
            try:
                for shape in shapes:
                    for name, values in family.options().items():
                        progress(family.spec.name)
                        report = bench.check(shape, values)
                        measured.append(_Measured(family, name, bench.time(shape, values), report))
            finally:
                bench.close()
    return measured, before.best_of(measure_roofline(options.threads, options.isa))


@dataclass(frozen=True)
class _Origin:
    """What all rows of a run share."""

    model: str
    threads: int
    isa: str
    int8: bool
    device: str
    source: str
    commit: str | None
    command: str
    date: str

    @classmethod
    def here(cls, model: str, options: CpuOptions) -> _Origin:
        from pegainfer.cli.machine import commit, cpu_model
        from pegainfer.kernels.cpu.library import isa_name, source_hash

        return cls(
            model=model,
            threads=options.threads,
            isa=isa_name(options.isa),
            int8=options.activation == "int8",
            device=cpu_model(),
            source=source_hash()[:12],
            commit=commit(),
            command=shlex.join(["pegainfer", *sys.argv[1:]]),
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def row(self, m: _Measured, roofline: Roofline) -> Row:
        from pegainfer.kernels.cpu.variant import arithmetic_of, variant_of
        from pegainfer.kernels.ledger import Row, memory_of, shape_of

        spec, dtypes, timing = m.family.spec, m.family.dtypes, m.timing
        worst = m.report.deviations.values()
        return Row(
            op=spec.name,
            variant=variant_of(spec, dtypes, self.isa, self.int8),
            case=m.case,
            shape=shape_of(spec, timing.sizes),
            formats=m.family.formats,
            device=self.device,
            threads=self.threads,
            source=self.source,
            error=max((d.error for d in worst), default=0.0),
            tolerance_share=round(max((d.share for d in worst), default=0.0), 4),
            us=round(timing.us(0.5), 3),
            us_p10=round(timing.us(0.1), 3),
            us_p90=round(timing.us(0.9), 3),
            samples=len(timing.nanoseconds),
            bytes=timing.cost.bytes,
            flops=timing.cost.flops,
            memory=memory_of(spec),
            arithmetic=arithmetic_of(spec, dtypes, self.int8),
            roofline=roofline,
            model=self.model,
            calls=m.family.calls,
            commit=self.commit,
            command=self.command,
            date=self.date,
        )


def _print(rows: list[Row], roofline: Roofline) -> None:
    from pegainfer.kernels.ledger import shape_text

    peaks = ", ".join(f"{name} {peak:g} G/s" for name, peak in roofline.peaks.items())
    device = f"{rows[0].device}, {rows[0].threads} threads"
    print(f"{device}: reads {roofline.read_gb_s:g} GB/s, caches {roofline.cache_gb_s:g} GB/s; {peaks}")
    print(
        f"{'op':22} {'variant':22} {'shape':44} {'µs':>9} {'p10':>9} {'p90':>9} {'GB/s':>7} {'GFLOP/s':>8} "
        f"{'share':>6} {'error':>6}"
    )
    for r in rows:
        print(
            f"{r.op:22} {r.variant:22} {shape_text(r):44} {r.us:9.1f} {r.us_p10:9.1f} {r.us_p90:9.1f} "
            f"{r.gb_s:7.1f} {r.gflop_s:8.1f} {r.share:6.1%} {r.tolerance_share:6.1%}"
        )
    print("share: of the roofline at this shape; error: of what the op's tolerance allows")
