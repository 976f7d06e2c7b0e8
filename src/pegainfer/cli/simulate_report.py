"""What a simulation prints and saves: quick answers, the report of a run with where its time goes, sweeps."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pegainfer.cli.simulate_run import Simulated, Workload, run

if TYPE_CHECKING:
    from pegainfer.app.simulation import SimulatedEngine
    from pegainfer.simulate.breakdown import OpShare

MARKS = {"interpolated": "~", "scaled": "*", "roofline": "?"}  # behind prices that were not measured
LEGEND = "~ between measured sizes, * scaled from another card, ? roofline"
SERVED = 0.9  # share of the offered rate that a server which keeps up serves
GAIN = 1.1  # growth of throughput for twice the clients below which more clients do not pay
MET = 0.95  # share of requests that meet the latency target


def print_quick(engine: SimulatedEngine, ttft: tuple[int, ...], tpot: tuple[int, ...], context: int) -> None:
    """A line for each prompt length and each batch."""
    from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
    from pegainfer.measure.prices import StepWork
    from pegainfer.simulate.replay import Arrival, Replay

    for tokens in ttft:
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = GenerateRequest(id="0", prompt=pack_tokens([0] * tokens), sampling=sampling)
        policy, runner = engine.start()
        (outcome,), usage = Replay(policy, runner, engine.host, [Arrival(0.0, request)]).run()
        if outcome.error:
            print(f"TTFT of {tokens} tokens: {outcome.error}")
            continue
        print(f"TTFT of {tokens} tokens: {outcome.tokens[0] * 1e3:.2f} ms, {usage.device * 1e3:.2f} of them "
              f"on the device in {usage.steps} steps")  # fmt: skip
    for rows in tpot:
        work = StepWork(rows, rows * context, (), rows)
        ops = engine.prices.ops(work)
        seconds = engine.seconds(work)
        floor = sum(op.floor_us for op in ops) / 1e6
        print(
            f"TPOT of {rows} rows at a context of {context}: {seconds * 1e3:.2f} ms, floor {floor * 1e3:.2f}"
        )
        for op in ops[:5]:
            print(
                f"    {op.op:32} {op.us / seconds / 1e4:5.1f}%  bound by {op.bound}{MARKS.get(op.origin, '')}"
            )


def tell(engine: SimulatedEngine, done: Simulated) -> None:
    """The report of `bench serve`, then where the time goes; saves what was asked for."""
    from pegainfer.bench.page import page
    from pegainfer.bench.report import lines, notes
    from pegainfer.bench.result import base_path, result, save
    from pegainfer.cli.machine import commit
    from pegainfer.simulate.breakdown import breakdown

    shares = breakdown(engine.prices, done.works)
    plan, figures = done.run.plan, done.run.figures
    remarks = notes(figures, None, 0)
    print(*lines(figures, plan.load, plan.report, None, None, done.run.server, stream=True), sep="\n")
    print(*time_lines(shares, done), sep="\n")
    for remark in remarks:
        print(remark, file=sys.stderr)
    report = plan.report
    if not (report.save_result or report.append_result or report.plot_timeline):
        return
    path = base_path(done.run)
    if report.save_result or report.append_result:
        provenance: dict[str, Any] = {
            "backend": "simulate",
            "endpoint_type": "simulate",
            "client_commit": commit(),
            "client_command": shlex.join(["pegainfer", *sys.argv[1:]]),
            "simulated_ops": [dataclasses.asdict(share) | {"bound": share.bound} for share in shares],
            "simulated_usage": dataclasses.asdict(done.usage),
        }
        save(path, result(done.run, provenance), append=report.append_result)
        print(f"saved {path}")
    if report.plot_timeline:
        target = path.with_suffix(".html")
        target.write_text(page(done.run, remarks, _table(shares, done)), encoding="utf-8")
        print(f"saved {target}")


def time_lines(shares: list[OpShare], done: Simulated) -> Iterator[str]:
    """The device's time by op and by bound, and what it waited for."""
    from pegainfer.bench.report import WIDTH

    total, usage = sum(s.seconds for s in shares) or 1.0, done.usage
    yield "Where the time goes".center(WIDTH, "-")
    yield f"{'op':32} {'share':>6} {'floor':>6}  bound by"
    for s in shares:
        mark = MARKS.get(s.origin, "")
        yield f"{s.op:32} {s.seconds / total:6.1%} {s.floor / s.seconds:6.1%}  {s.bound}{mark}"
    bounds: dict[str, float] = {}
    for s in shares:
        for bound, seconds in s.bounds.items():
            bounds[bound] = bounds.get(bound, 0.0) + seconds
    parts = [f"{name} {seconds / usage.seconds:.1%}" for name, seconds in bounds.items()]
    around = max(0.0, usage.device - sum(bounds.values()))
    parts += [f"around kernels {around / usage.seconds:.1%}"] * (around > 1e-6)
    parts.append(f"host {usage.waits / usage.seconds:.1%}")
    parts.append(f"no request {max(0.0, 1 - (usage.device + usage.waits) / usage.seconds):.1%}")
    yield "of the run, bound by: " + ", ".join(parts)
    yield LEGEND


def _table(shares: list[OpShare], done: Simulated) -> str:
    rows = "".join(
        f"<tr><td>{escape(s.op)}</td><td>{s.seconds / done.usage.device:.1%}</td>"
        f"<td>{s.floor / s.seconds:.1%}</td><td>{s.bound}</td><td>{s.origin}</td></tr>"
        for s in shares
    )
    head = "<tr><th>op</th><th>share</th><th>floor</th><th>bound by</th><th>price</th></tr>"
    return f"<h2>Where the time goes</h2><table>{head}{rows}</table>"


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep; `met`: share of requests within the latency target, 1.0 without one."""

    value: float
    throughput: float  # output tokens a second
    served: float  # requests a second
    ttft: float  # median, ms
    tpot: float
    met: float


def sweep_values(low: float, high: float) -> list[float]:
    """From low to high, each twice the one before, and high itself."""
    values = [low]
    while values[-1] * 2 < high:
        values.append(values[-1] * 2)
    return values if low == high else [*values, high]


def knee(points: list[Point], kind: str) -> Point:
    """The last point before more load does not bring more."""
    best = points[0]
    for before, point in pairwise(points):
        kept_up = point.served >= SERVED * point.value
        if not (kept_up if kind == "rate" else point.throughput >= GAIN * before.throughput):
            break
        best = point
    return best


def within_target(points: list[Point]) -> Point | None:
    """The greatest load under which requests meet the latency target."""
    good = [p for p in points if p.met >= MET]
    return max(good, key=lambda p: p.value, default=None)


def print_sweep(engine: SimulatedEngine, workload: Workload, kind: str, span: tuple[float, float]) -> None:
    """A line a point; the knee, and the best point within --goodput's bounds, are marked."""
    points = [_point(engine, workload, kind, value) for value in sweep_values(*span)]
    turn, best = knee(points, kind), within_target(points) if workload.report.slos() else None
    print(f"{kind:>12} {'tokens/s':>9} {'req/s':>7} {'TTFT ms':>9} {'TPOT ms':>8} {'in target':>9}")
    for p in points:
        marks = ["knee"] * (p is turn) + ["best within the target"] * (p is best)
        print(f"{p.value:12g} {p.throughput:9.0f} {p.served:7.2f} {p.ttft:9.1f} {p.tpot:8.2f} {p.met:9.1%}"
              f"  {', '.join(marks)}")  # fmt: skip
    if workload.report.slos() and best is None:
        print("no point meets the latency target")


def _point(engine: SimulatedEngine, workload: Workload, kind: str, value: float) -> Point:
    changes: dict[str, Any] = {"request_rate": value} if kind == "rate" else {"max_concurrency": int(value)}
    load = dataclasses.replace(workload.load, **changes)
    f = run(engine, dataclasses.replace(workload, load=load)).run.figures
    met = 1.0 if f.request_goodput is None else f.request_goodput / max(f.request_throughput, 1e-9)
    ttft, tpot = f.distributions["ttft"].median, f.distributions["tpot"].median
    return Point(value, f.output_throughput, f.request_throughput, ttft, tpot, met)
