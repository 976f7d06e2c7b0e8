"""Where a step's time goes: runs of a model's programs, their calls' times, and each op beside its floor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from pegainfer.measure.ledger import Roofline, memory_of
from pegainfer.ops.backend import Backend, Executor
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import OpSpec, Role
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]
Arithmetic = Callable[[OpSpec, Mapping[str, str]], str]  # a key of the roofline's peaks, by op and dtypes


class Timed(Executor, Protocol):
    """An executor that keeps how long each call has taken."""

    def timings(self) -> list[tuple[OpCall, int]]: ...

    def reset_timings(self) -> None: ...


@dataclass(frozen=True)
class ProgramRun:
    """One execution of a program.

    Args:
        env: the step's sizes.
        started, seconds: CLOCK_MONOTONIC, the whole execution.
        timings: each call and its nanoseconds.
    """

    env: dict[str, int]
    started: float
    seconds: float
    timings: list[tuple[OpCall, int]]

    @property
    def is_forward(self) -> bool:
        """Whether a step begins here: only a forward pass counts cached tokens."""
        return "C" in self.env


class Profiler:
    """Stands between a runner and a backend whose executors time their calls."""

    def __init__(self) -> None:
        self._runs: list[ProgramRun] | None = None

    def around(self, backend: Backend) -> Backend:
        """`backend`, with every execution noted between `start` and `stop`."""
        return _Profiled(backend, self)

    def start(self) -> None:
        self._runs = []

    def stop(self) -> list[ProgramRun]:
        """What ran since `start`, in order. May be called while a step runs; that one is not in it."""
        runs, self._runs = self._runs or [], None
        return list(runs)

    def note(self, executor: Timed, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, Array]:
        """Runs a program once."""
        runs = self._runs
        if runs is None:
            return executor.run(inputs, env)
        executor.reset_timings()
        started = time.monotonic()
        outputs = executor.run(inputs, env)
        runs.append(ProgramRun(dict(env), started, time.monotonic() - started, executor.timings()))
        return outputs


class _Profiled:
    """Implements ops.backend.Backend."""

    def __init__(self, backend: Backend, profiler: Profiler) -> None:
        self._backend = backend
        self._profiler = profiler

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> Executor:
        return _ProfiledExecutor(self._backend.prepare(program, states, largest), self._profiler)

    def close(self) -> None:
        self._backend.close()


class _ProfiledExecutor:
    def __init__(self, executor: Executor, profiler: Profiler) -> None:
        self._executor: Any = executor  # a Timed: the backend was made to time its calls
        self._profiler = profiler

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, Array]:
        return self._profiler.note(self._executor, inputs, env)


@dataclass(frozen=True)
class OpTime:
    """One op of a step, all its calls of the same widths together: medians over steps, in microseconds.

    Args:
        floor_us: what the calls' bytes and arithmetic take at the least.
    """

    op: str
    calls: int
    us: float
    floor_us: float


@dataclass(frozen=True)
class StepTime:
    """Medians over steps, in microseconds.

    Args:
        wall_us: from one step's start to the next one's.
        programs_us: inside the executors, kernels included.
    """

    steps: int
    wall_us: float
    programs_us: float
    ops: tuple[OpTime, ...]

    @property
    def kernels_us(self) -> float:
        return sum(o.us for o in self.ops)

    @property
    def floor_us(self) -> float:
        return sum(o.floor_us for o in self.ops)


def steps_of(runs: Sequence[ProgramRun]) -> list[list[ProgramRun]]:
    """A forward pass and what ran until the next one."""
    steps: list[list[ProgramRun]] = []
    for run in runs:
        if run.is_forward:
            steps.append([])
        if steps:
            steps[-1].append(run)
    return steps


def step_time(steps: Sequence[Sequence[ProgramRun]], roofline: Roofline, arithmetic: Arithmetic) -> StepTime:
    """Adds up each step by op and takes medians.

    Args:
        steps: at least one, in order, of one kind and next to each other.
    """
    floors = _Floors(roofline, arithmetic)
    times: list[dict[str, float]] = []
    least: list[dict[str, float]] = []
    calls: dict[str, int] = {}
    for step in steps:
        times.append({})
        least.append({})
        count: dict[str, int] = {}
        for run in step:
            for call, ns in run.timings:
                name = op_label(call)
                times[-1][name] = times[-1].get(name, 0.0) + ns / 1e3
                least[-1][name] = least[-1].get(name, 0.0) + floors.us(call, run.env)
                count[name] = count.get(name, 0) + 1
        calls |= {name: max(n, calls.get(name, 0)) for name, n in count.items()}
    starts = [step[0].started for step in steps]
    ends = [step[-1].started + step[-1].seconds for step in steps]
    walls = [b - a for a, b in pairwise(starts)] or [ends[0] - starts[0]]
    return StepTime(
        steps=len(steps),
        wall_us=statistics.median(walls) * 1e6,
        programs_us=statistics.median(sum(run.seconds for run in step) for step in steps) * 1e6,
        ops=tuple(OpTime(name, n, _median(times, name), _median(least, name)) for name, n in calls.items()),
    )


def op_label(call: OpCall) -> str:
    """The op, and the widths of its matrix where it has one: 'linear_residual 1536→576'."""
    for o in call.spec.operands:
        if o.role is Role.WEIGHT and o.name in call.tensors:
            *_, rows, columns = call.tensors[o.name].shape  # experts come before them
            return f"{call.spec.name} {columns}→{rows}"
    return call.spec.name


def _median(steps: list[dict[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


class _Floors:
    """Least times of calls, computed once for each call and sizes."""

    def __init__(self, roofline: Roofline, arithmetic: Arithmetic) -> None:
        self._roofline = roofline
        self._arithmetic = arithmetic
        self._known: dict[tuple[object, ...], float] = {}

    def us(self, call: OpCall, env: Mapping[str, int]) -> float:
        key = (id(call), *env.values())
        if key not in self._known:
            dtypes = {name: t.dtype for name, t in call.tensors.items()}
            arithmetic = self._arithmetic(call.spec, dtypes)
            cost = call.cost(env)
            self._known[key] = self._roofline.floor_us(cost, memory_of(call.spec), arithmetic)
        return self._known[key]
