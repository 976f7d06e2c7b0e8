"""A bench case once more, step by step: each op against its floor, and the host's time around programs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

from pegainfer.contract.step import StepPlan, StepResult

LEAST_US = 1.0  # of an op whose ratio to its floor says anything

if TYPE_CHECKING:
    from pegainfer.app.config import EngineConfig
    from pegainfer.engine.inprocess import InProcessEngine
    from pegainfer.measure.ledger import Roofline
    from pegainfer.measure.profile import ProgramRun, StepTime


class StepTracer:
    """Implements contract.step.Tracer: keeps what each committed step took in the runner."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step(self, plan: StepPlan, result: StepResult, now: float) -> None:
        if plan.rows:
            self.seconds.append(result.seconds)


@dataclass(frozen=True)
class CaseProfile:
    """One case's step. Microseconds; `engine_us` by what the engine's thread did meanwhile, a mean."""

    time: StepTime
    runner_us: float
    engine_us: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """For the results file."""
        t = self.time
        parts = {
            "steps": t.steps, "wall": t.wall_us, "floor": t.floor_us, "kernels": t.kernels_us,
            "programs": t.programs_us, "runner": self.runner_us,
        }  # fmt: skip
        ops = [
            {"op": o.op, "calls": o.calls, "us": round(o.us, 1), "floor": round(o.floor_us, 1)} for o in t.ops
        ]
        return {name: round(us, 1) for name, us in parts.items()} | {"ops": ops}


class StepProfiler:
    """Runs cases under a profiler that the engine was built with."""

    def __init__(self, config: EngineConfig) -> None:
        """Measures the machine's ceilings; `config` is that of the engine to be built."""
        from pegainfer.measure.cpu.roofline import measure_roofline
        from pegainfer.measure.profile import Profiler

        self.profiler = Profiler()
        self.tracer = StepTracer()
        self._config = config
        self.roofline: Roofline = measure_roofline(config.threads or 0, config.isa)

    def measure_again(self) -> None:
        """Keeps the better of each ceiling. The engine must be idle."""
        from pegainfer.measure.cpu.roofline import measure_roofline

        again = measure_roofline(self._config.threads or 0, self._config.isa)
        self.roofline = self.roofline.best_of(again)

    def profile(
        self,
        engine: InProcessEngine,
        run: Callable[[], object],
        wanted: Callable[[ProgramRun], bool] | None = None,
    ) -> CaseProfile:
        """Runs a case.

        Args:
            wanted: whether a step with this forward pass belongs to it; None: all do, and count as one step.
        """
        from pegainfer.app.load import cpu_options
        from pegainfer.measure.cpu.variant import activation_on, arithmetic_of
        from pegainfer.measure.profile import step_time, steps_of

        before = engine.stats()
        self.tracer.seconds.clear()
        self.profiler.start()
        run()
        steps, after = steps_of(self.profiler.stop()), engine.stats()
        seconds = self.tracer.seconds[: len(steps)]
        if wanted is None:
            steps, seconds = [list(chain.from_iterable(steps))], [sum(seconds)]
        else:
            chosen = [wanted(step[0]) for step in steps]
            steps, seconds = list(compress(steps, chosen)), list(compress(seconds, chosen))
        passed = max(1, after.steps - before.steps)
        activation = activation_on(cpu_options(self._config).activation, self._config.isa)
        return CaseProfile(
            time=step_time(steps, self.roofline, partial(arithmetic_of, activation=activation)),
            runner_us=statistics.median(seconds or [0.0]) * 1e6,
            engine_us={
                name: (after.host_seconds[name] - before.host_seconds.get(name, 0.0)) / passed * 1e6
                for name in ("schedule", "launch", "commit", "emit")
            },
        )


def print_profile(title: str, profile: CaseProfile) -> None:
    """The step's ops, slowest first, then what is not in a kernel.

    A ratio below 1: the cost counts work that no row asked for, or the data lay nearer than in memory.
    """
    t = profile.time
    steps = f"medians of {t.steps} steps" if t.steps > 1 else "all its steps together"
    print(f"\n{title}: {t.wall_us:.0f} µs, floor {t.floor_us:.0f} µs ({steps})")
    print(f"  {'op':34} {'calls':>5} {'µs':>10} {'of step':>8} {'floor µs':>10} {'× floor':>8}")
    for o in sorted(t.ops, key=lambda o: -o.us):
        ratio = f"{o.us / o.floor_us:8.1f}" if o.us >= LEAST_US else f"{'–':>8}"
        print(f"  {o.op:34} {o.calls:5} {o.us:10.1f} {o.us / t.wall_us:8.1%} {o.floor_us:10.1f} {ratio}")
    for name, us in (
        ("around the kernels, in programs", t.programs_us - t.kernels_us),
        ("in the runner: staging, results", profile.runner_us - t.programs_us),
        ("between steps", t.wall_us - profile.runner_us),
    ):
        print(f"  {name:34} {'':5} {us:10.1f} {us / t.wall_us:8.1%}")
    thread = ", ".join(f"{name} {us:.0f}" for name, us in profile.engine_us.items())
    print(f"  meanwhile on the engine's thread, µs a step: {thread}")
