"""pegainfer bench ops: every op of a model's step alone, at the shapes of decode and prefill."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from msgspec.structs import replace

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.cli.spec import EngineSpec
    from pegainfer.measure.ledger import Roofline, Row
    from pegainfer.measure.opbench import Identity, InStep, OpDevice, StepTimes, Timing
    from pegainfer.measure.step_shapes import StepShape
    from pegainfer.measure.workload import Family
    from pegainfer.ops.check import Report

# Of EngineConfig, those that matter here, by device.
FLAGS = {
    "cpu": ("--threads", "--isa", "--activation-dtype", "--kv-cache-dtype"),
    "cuda": ("--device-ordinal", "--load-format"),
}


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
    the op's reference. On a GPU, also what the op adds to a whole step, where it overlaps with
    others. Weights are seeded; of the model, only the sizes and formats count.
    """
    from pegainfer.measure import ledger

    if flags.device not in ("auto", *FLAGS):
        raise UnsupportedError("no ops to bench", expected="--device cpu or cuda", got=flags.device)
    target = choose(model, flags, engine, SchedulerConfig(), given, text=False)
    backend = target.spec.engine.backend
    given.refuse(EngineConfig, f"bench ops --device {backend}", but=FLAGS[backend])
    device = _open(target.spec.engine)
    try:
        plan = _plan(target.spec, device, bench.op)
        measured, roofline = _measure(plan, device)
        steps = _steps(target.spec, device, plan)
        origin = _Origin.here(target.spec.name, device)
    finally:
        device.close()
    rows = [origin.row(m, roofline, _in_step(m, steps)) for m in measured]
    if not bench.op:
        rows += [origin.forward(rows[0], shape, times) for shape, times in steps.items()]
    _print(rows, roofline)
    faults = [f"{m.report.label}: {fault}" for m in measured for fault in m.report.faults]
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    if bench.append and not faults:
        path = Path(bench.ledger) if bench.ledger else ledger.LEDGER
        ledger.append(rows, path)
        print(f"{len(rows)} rows appended to {path}")
    return 1 if faults else 0


def _open(engine: EngineConfig) -> OpDevice:
    """Raises what opening a GPU raises."""
    if engine.backend == "cuda":
        from pegainfer.measure.cuda.opbench import CudaOps

        return CudaOps(engine.device_ordinal)
    from pegainfer.app.load import cpu_options
    from pegainfer.cli.machine import cpu_model
    from pegainfer.lower.cpu.threads import usable_cores
    from pegainfer.measure.cpu.opbench import CpuOps

    options = cpu_options(engine)
    return CpuOps(cpu_model(), replace(options, threads=options.threads or usable_cores()))


Plan = list[tuple["Family", tuple["StepShape", ...]]]


def _plan(spec: EngineSpec, device: OpDevice, wanted: tuple[str, ...]) -> Plan:
    """The model's calls and their shapes. Raises ConfigError for an op that it does not have."""
    from pegainfer.cli.plan import step_programs

    programs = step_programs(spec)
    found = device.families([programs.forward, programs.sampler])
    names = list(dict.fromkeys(f.spec.name for f in found))
    if unknown := sorted(set(wanted) - set(names)):
        raise ConfigError("no such op in this model's step", expected=" ".join(names), got=" ".join(unknown))
    longest = programs.info.max_model_len
    chosen = [f for f in found if not wanted or f.spec.name in wanted]
    return [(f, f.step_shapes(longest, device.step_sizes)) for f in chosen]


@dataclass(frozen=True)
class _Measured:
    """One op at one shape under one option."""

    family: Family
    shape: StepShape
    case: str
    timing: Timing
    report: Report
    identity: Identity


def _measure(plan: Plan, device: OpDevice) -> tuple[list[_Measured], Roofline]:
    """All shapes and options of all families; the machine's ceilings before and after, the better ones."""
    from pegainfer.cli.progress import counted_progress

    measured: list[_Measured] = []
    before = device.roofline()
    with counted_progress(sum(len(shapes) * len(f.options()) for f, shapes in plan)) as progress:
        for family, shapes in plan:
            bench = device.bench(family, shapes)
            try:
                for shape in shapes:
                    for name, values in family.options().items():
                        progress(family.spec.name)
                        report = bench.check(shape, values)
                        timing = bench.time(shape, values)
                        measured.append(_Measured(family, shape, name, timing, report, bench.identity(shape)))
            finally:
                bench.close()
    return measured, before.best_of(device.roofline())


def _steps(spec: EngineSpec, device: OpDevice, plan: Plan) -> dict[StepShape, StepTimes]:
    """Whole forward passes of the model on this device, with the planned ops' parts of them."""
    from pegainfer.cli.plan import step_programs

    longest = step_programs(spec).info.max_model_len
    wanted = frozenset(family.key for family, _ in plan)
    return device.steps(lambda blocks: step_programs(spec, blocks).forward, longest, wanted)


def _in_step(m: _Measured, steps: dict[StepShape, StepTimes]) -> InStep | None:
    times = steps.get(m.shape)
    return None if times is None else times.calls.get(m.family.key)


@dataclass(frozen=True)
class _Origin:
    """What all rows of a run share."""

    model: str
    device: str
    threads: int
    commit: str | None
    command: str
    date: str

    @classmethod
    def here(cls, model: str, device: OpDevice) -> _Origin:
        from pegainfer.cli.machine import commit

        return cls(
            model=model,
            device=device.name,
            threads=device.threads,
            commit=commit(),
            command=shlex.join(["pegainfer", *sys.argv[1:]]),
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def row(self, m: _Measured, roofline: Roofline, in_step: InStep | None) -> Row:
        from pegainfer.measure.ledger import Row, shape_of

        spec, timing, ran = m.family.spec, m.timing, m.identity
        worst = m.report.deviations.values()
        return Row(
            op=spec.name,
            variant=ran.variant,
            kernels=ran.kernels,
            case=m.case,
            shape=shape_of(spec, timing.sizes),
            formats=m.family.formats,
            device=self.device,
            threads=self.threads,
            source=ran.source,
            error=max((d.error for d in worst), default=0.0),
            tolerance_share=round(max((d.share for d in worst), default=0.0), 4),
            us=round(timing.us(0.5), 3),
            us_p10=round(timing.us(0.1), 3),
            us_p90=round(timing.us(0.9), 3),
            samples=len(timing.nanoseconds),
            bytes=timing.cost.bytes,
            flops=timing.cost.flops,
            memory=ran.memory,
            arithmetic=ran.arithmetic,
            roofline=roofline,
            model=self.model,
            calls=m.family.calls,
            step_us=None if in_step is None else round(in_step.us, 3),
            step_kernels=() if in_step is None else in_step.kernels,
            commit=self.commit,
            command=self.command,
            date=self.date,
        )

    def forward(self, like: Row, shape: StepShape, times: StepTimes) -> Row:
        """A whole forward pass as a row of its own; `like` is any row of the run."""
        from pegainfer.measure.ledger import FORWARD

        us, sizes = round(times.us, 3), dict(sorted(shape.env.items()))
        return msgspec.structs.replace(
            like, op=FORWARD, kernels=times.kernels, case="", shape=sizes, formats={}, source="", error=0.0,
            tolerance_share=0.0, us=us, us_p10=us, us_p90=us, samples=1, bytes=times.cost.bytes,
            flops=times.cost.flops, memory="dram", calls=1, step_us=None, step_kernels=(),
        )  # fmt: skip


def _print(rows: list[Row], roofline: Roofline) -> None:
    from pegainfer.measure.ledger import shape_text

    peaks = ", ".join(f"{name} {peak:g} G/s" for name, peak in roofline.peaks.items())
    threads = f", {rows[0].threads} threads" if rows[0].threads else ""
    reads = f"reads {roofline.read_gb_s:g} GB/s, caches {roofline.cache_gb_s:g} GB/s"
    print(f"{rows[0].device}{threads}: {reads}; {peaks}")
    print(
        f"{'op':22} {'variant':22} {'shape':44} {'µs':>9} {'p10':>9} {'p90':>9} {'GB/s':>7} {'GFLOP/s':>8} "
        f"{'share':>6} {'error':>6} {'in a step, µs':>13} {'share':>6}"
    )
    for r in rows:
        print(
            f"{r.op:22} {r.variant:22} {shape_text(r):44} {r.us:9.1f} {r.us_p10:9.1f} {r.us_p90:9.1f} "
            f"{r.gb_s:7.1f} {r.gflop_s:8.1f} {r.share:6.1%} {r.tolerance_share:6.1%}"
            + ("" if r.step_us is None else f" {r.step_us:13.1f} {r.floor_us / max(r.step_us, 1e-3):6.1%}")
        )
        if r.kernels:
            print(f"{'':22} {' '.join(r.kernels)}")
    print("share: of the roofline at this shape; error: of what the op's tolerance allows")
