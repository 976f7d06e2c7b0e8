"""A step's time by op: what a profiler notes around a backend, and how it adds up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pegainfer.measure.ledger import Roofline
from pegainfer.measure.profile import OpTime, Profiler, ProgramRun, op_label, step_time, steps_of
from pegainfer.ops.activation import SILU_MUL
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import EXPERT_DOWN
from pegainfer.ops.program import Builder, OpCall, Program
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]
# 1 byte a nanosecond from memory, 10 from caches; 2 operations a nanosecond, 8 of 8-bit numbers.
ROOF = Roofline(read_gb_s=1.0, cache_gb_s=10.0, peaks={"f32": 2.0, "int8": 8.0})


def program() -> Program:
    """Two products of the same widths and a product of others, then a pointwise op."""
    b = Builder("p")
    a, out, wide = b.input("a", "T", 32, dtype="f32"), b.output("out", "T", 32), b.output("wide", "T", 64)
    for i in range(2):
        b.emit(LINEAR, out=out, a=a, w=b.weight(f"w{i}", 32, 32, dtype="f32"))
    b.emit(LINEAR, out=wide, a=a, w=b.weight("up", 64, 32, dtype="f32"))
    b.emit(SILU_MUL, out=out, gate=out, up=a)
    return b.build()


class FakeExecutor:
    """Takes 1, 2, 3 … µs for its calls, summed up over runs."""

    def __init__(self, program: Program) -> None:
        self.calls = program.calls
        self.runs = 0
        self.ran: list[dict[str, int]] = []

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> dict[str, Array]:
        self.runs += 1
        self.ran.append(dict(env))
        return {"out": inputs["a"]}

    def timings(self) -> list[tuple[OpCall, int]]:
        return [(call, self.runs * 1000 * (i + 1)) for i, call in enumerate(self.calls)]

    def reset_timings(self) -> None:
        self.runs = 0


class FakeBackend:
    def __init__(self) -> None:
        self.executors: list[FakeExecutor] = []
        self.closed = False

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> FakeExecutor:
        self.executors.append(FakeExecutor(program))
        return self.executors[-1]

    def close(self) -> None:
        self.closed = True


def test_runs_are_noted_between_start_and_stop_only() -> None:
    profiler, backend = Profiler(), FakeBackend()
    around = profiler.around(backend)
    executor = around.prepare(program(), {}, {})
    given = np.ones(3)
    assert executor.run({"a": given}, {"T": 1})["out"] is given
    profiler.start()
    executor.run({"a": given}, {"T": 2})
    executor.run({"a": given}, {"T": 3})
    runs = profiler.stop()
    executor.run({"a": given}, {"T": 4})
    assert [run.env for run in runs] == [{"T": 2}, {"T": 3}]
    assert backend.executors[0].ran == [{"T": n} for n in (1, 2, 3, 4)]
    for run in runs:  # each has its own times, not sums
        assert [ns for _, ns in run.timings] == [1000, 2000, 3000, 4000]
        assert run.seconds >= 0
    assert runs[0].started + runs[0].seconds <= runs[1].started
    assert profiler.stop() == []


def test_closing_closes_the_backend() -> None:
    backend = FakeBackend()
    Profiler().around(backend).close()
    assert backend.closed


def run(env: dict[str, int], started: float, seconds: float = 0.0, us: tuple[float, ...] = ()) -> ProgramRun:
    timings = [(call, int(t * 1000)) for call, t in zip(CALLS, us, strict=False)]
    return ProgramRun(env, started, seconds, timings)


CALLS = program().calls


def test_a_step_is_a_forward_pass_and_what_follows_it() -> None:
    runs = [run({"L": 1}, 0), run({"T": 1, "C": 5}, 1), run({"L": 1}, 2), run({"T": 2, "C": 6}, 3)]
    assert steps_of(runs) == [runs[1:3], runs[3:]]


def test_calls_of_the_same_widths_are_one_op() -> None:
    assert [op_label(c) for c in CALLS] == ["linear 32→32", "linear 32→32", "linear 32→64", "silu_mul"]


def test_an_op_of_experts_is_named_by_the_widths_of_one_of_them() -> None:
    b = Builder("p")
    act, experts = b.input("act", "T", 2, 48, dtype="f32"), b.input("experts", "T", 2, dtype="i32")
    gates, out = b.input("gates", "T", 2, dtype="f32"), b.output("out", "T", 32)
    w = b.weight("down", 8, 32, 48, dtype="f32")
    b.emit(EXPERT_DOWN, out=out, act=act, experts=experts, gates=gates, w_down=w)
    assert op_label(b.build().calls[0]) == "expert_down 48→32"


def test_times_add_up_within_a_step_and_are_medians_over_steps() -> None:
    env = {"T": 1, "C": 9}
    steps = [
        [run(env, 0.0, 0.004, (10, 20, 5, 1))],
        [run(env, 0.010, 0.005, (11, 22, 6, 2))],
        [run(env, 0.030, 0.009, (90, 90, 90, 90))],
    ]
    found = step_time(steps, ROOF, lambda spec, dtypes: "f32")
    by_op = {o.op: (o.calls, o.us) for o in found.ops}
    assert by_op == {"linear 32→32": (2, 33.0), "linear 32→64": (1, 6.0), "silu_mul": (1, 2.0)}
    assert found.steps == 3
    assert found.wall_us == pytest.approx(15_000)  # between starts: 10 and 20 ms
    assert found.programs_us == pytest.approx(5_000)
    assert found.kernels_us == 41.0


def test_a_single_step_lasts_until_its_last_program_ends() -> None:
    step = [run({"T": 1, "C": 1}, 1.0, 0.25), run({"L": 1}, 2.0, 0.5)]
    found = step_time([step], ROOF, lambda spec, dtypes: "f32")
    assert found.wall_us == pytest.approx(1.5e6)
    assert found.programs_us == pytest.approx(0.75e6)


@pytest.mark.parametrize(
    ("arithmetic", "tokens", "floors"),
    [
        # A product: 2 · 32 · 32 FLOPs a token, 4096 bytes of weights, 2 · 128 of activations a token; the one
        # of 64 rows twice the weights and 3 · 128. The pointwise op: 6 FLOPs an element, 3 · 128 bytes.
        ("f32", 1, (2 * 4.352, 8.576, 0.096)),  # µs; memory bounds products
        ("f32", 100, (2 * 102.4, 204.8, 9.6)),  # arithmetic at 2 a nanosecond
        ("int8", 100, (2 * 29.696, 51.2, 9.6)),  # memory again, then arithmetic at 8
    ],
)
def test_floors_follow_the_roofline(arithmetic: str, tokens: int, floors: tuple[float, ...]) -> None:
    def choose(spec: object, dtypes: Mapping[str, str]) -> str:
        return arithmetic if "w" in dtypes else "f32"

    step = [run({"T": tokens, "C": 1}, 0.0, us=(1, 1, 1, 1))]
    found = step_time([step], ROOF, choose)
    assert [o.floor_us for o in found.ops] == pytest.approx(floors)
    assert found.floor_us == pytest.approx(sum(floors))
    assert isinstance(found.ops[0], OpTime)
