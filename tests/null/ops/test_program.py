"""Recorded programs: lowering, lifetimes in the arena, costs, views, order of writes and reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.contract.errors import OpError
from pegainfer.ops.activation import SILU_MUL
from pegainfer.ops.check import check_case, suitable_cases, through_program
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD, QKV_NORM_ROPE_APPEND
from pegainfer.ops.compose import one_call, run_reference
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import ARENA_ALIGN, Builder, Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.sample import SAMPLE
from pegainfer.ops.spec import Arrays, OpSpec
from pegainfer.ops.tensor import NUMPY, Kind, Tensor
from pegainfer.runtime.weights.weight import Weight

NEVER, ALWAYS = (lambda call: False), (lambda call: True)


def small() -> Program:
    """Two layers of a feed-forward block under an embedding and a head."""
    b = Builder("small")
    x, ids, rows = b.output("x", "T", 8), b.input("ids", "T"), b.input("rows", "L")
    table, norm = b.weight("table", 20, 8, dtype="f32"), b.weight("norm", 8, dtype="f32")
    act = b.buffer("act", "T", 16)
    b.emit(EMBEDDING, out=x, table=table, ids=ids)
    for i in range(2):
        gate, up = (b.weight(f"{name}.{i}", 16, 8, dtype="f32") for name in ("gate", "up"))
        b.emit(GATE_UP_SWIGLU, {"eps": 1e-5}, out=act, x=x, norm=norm, w_gate=gate, w_up=up)
        b.emit(LINEAR_RESIDUAL, x=x, a=act, w=b.weight(f"down.{i}", 8, 16, dtype="f32"))
    logits = b.output("logits", "L", 20)
    b.emit(LM_HEAD, {"eps": 1e-5}, logits=logits, x=x, rows=rows, norm=norm, w=table)
    return b.build()


def test_lowering_replaces_coarse_calls_in_place_and_keeps_what_it_is_told() -> None:
    program = small()
    assert [c.spec.name for c in program.lowered(ALWAYS).calls] == [c.spec.name for c in program.calls]
    block = ["rms_norm", "linear", "linear", "silu_mul", "linear_residual"]
    fine = program.lowered(NEVER)
    assert [c.spec.name for c in fine.calls] == [
        "embedding",
        *block,
        *block,
        "gather_rows",
        "rms_norm",
        "linear",
    ]
    partly = program.lowered(lambda call: call.spec is LM_HEAD)
    assert [c.spec.name for c in partly.calls] == ["embedding", *block, *block, "lm_head"]


def test_lowered_buffers_are_each_calls_own() -> None:
    program = small()
    fine = program.lowered(NEVER)
    names = [t.name for t in fine.tensors(Kind.BUFFER)]
    assert len(names) == len(set(names)) and {"1.gate_up_swiglu.h", "3.gate_up_swiglu.h"} <= set(names)
    shared = (Kind.INPUT, Kind.WEIGHT, Kind.OUTPUT)
    assert set(fine.tensors(*shared)) == set(program.tensors(*shared)), "all else is the same tensors"


@pytest.mark.parametrize(
    "spec", [QKV_NORM_ROPE_APPEND, GATE_UP_SWIGLU, LM_HEAD, SAMPLE], ids=lambda s: s.name
)
def test_a_lowered_program_computes_what_the_coarse_op_means(spec: OpSpec) -> None:
    """Lowered beforehand, with every buffer at its place in one arena, against the composed reference."""

    def execute(
        program: Program,
        weights: Mapping[str, Weight],
        states: Arrays,
        inputs: Arrays,
        sizes: Mapping[str, int],
    ) -> Arrays:
        plain = {k: w.values() for k, w in weights.items()}
        return run_in_arena(program.lowered(NEVER), {**plain, **states, **inputs}, sizes)

    for case in suitable_cases(spec, 21):
        report = check_case(spec, case, through_program(execute))
        assert not report.faults, report


def run_in_arena(program: Program, arrays: Arrays, env: Mapping[str, int]) -> Arrays:
    """The program on views of one block of memory, as a backend lays it out."""
    plan = program.plan_arena(env)
    arena = np.full(plan.size, 0xFF, np.uint8)
    for t, offset in plan.offsets.items():
        part = arena[offset : offset + t.nbytes(env)]
        arrays[t.name] = part.view(NUMPY[t.dtype]).reshape(t.sizes(env))
    for call in program.calls:
        bound = {
            k: arrays[t.name] if t.kind in (Kind.WEIGHT, Kind.STATE) else arrays[t.name].reshape(t.sizes(env))
            for k, t in call.tensors.items()
        }
        run_reference(call.spec, env, bound, call.attrs)
    return {t.name: arrays[t.name] for t in program.tensors(Kind.OUTPUT)}


# A random program: each call reads one or two of the buffers so far and writes a new or an older one.
CALLS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 70), st.booleans(), st.booleans()),
    min_size=1,
    max_size=25,
)


def random_program(calls: list[tuple[int, int, int, bool, bool]]) -> Program:
    b = Builder("random")
    made = [b.input("x", "T", 8, dtype="f32")]
    for i, (first, second, width, outlives, in_place) in enumerate(calls):
        source = made[first % len(made)]
        k = source.shape[1]
        assert isinstance(k, int)
        if in_place and source.kind is not Kind.INPUT:
            other = made[second % len(made)]
            w = b.weight(f"w{i}", k, int(other.shape[1]), dtype="f32")
            b.emit(LINEAR_RESIDUAL, x=source, a=other, w=w)
            continue
        make = b.output if outlives else b.buffer
        made.append(make(f"t{i}", "T", width))
        b.emit(LINEAR, out=made[-1], a=source, w=b.weight(f"w{i}", width, k, dtype="f32"))
    return b.build()


@given(CALLS, st.integers(1, 5))
def test_buffers_that_live_at_once_never_overlap(
    calls: list[tuple[int, int, int, bool, bool]], t: int
) -> None:
    program = random_program(calls)
    env = {"T": t}
    plan = program.plan_arena(env)
    lives: dict[Tensor, tuple[int, int]] = {}
    for i, call in enumerate(program.calls):
        for x in call.tensors.values():
            s = x.storage
            if s.kind in (Kind.BUFFER, Kind.OUTPUT):
                lives[s] = (lives.get(s, (i, i))[0], i)
    lives = {s: (a, len(calls) if s.kind is Kind.OUTPUT else z) for s, (a, z) in lives.items()}
    assert set(plan.offsets) == set(lives)
    for s, (a, z) in lives.items():
        start, stop = plan.offsets[s], plan.offsets[s] + s.nbytes(env)
        assert start % ARENA_ALIGN == 0 and stop <= plan.size
        for other, (b, y) in lives.items():
            if other is not s and a <= y and b <= z:
                at = plan.offsets[other]
                assert stop <= at or at + other.nbytes(env) <= start, f"{s} and {other}"


@given(CALLS)
def test_the_arena_gives_the_values_that_separate_memory_gives(
    calls: list[tuple[int, int, int, bool, bool]],
) -> None:
    program, env = random_program(calls), {"T": 2}
    rng = np.random.default_rng(0)
    arrays = {
        t.name: rng.standard_normal(t.sizes(env), np.float32) / 8
        for t in program.tensors(Kind.INPUT, Kind.WEIGHT)
    }
    want = ReferenceExecutor(program, arrays).run({"x": arrays["x"]}, env)
    got = run_in_arena(program, dict(arrays), env)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


def test_a_chain_needs_two_buffers_memory_only() -> None:
    calls = [(i, 0, 16, False, False) for i in range(10)]
    assert random_program(calls).plan_arena({"T": 4}).size == 2 * 4 * 16 * 4


def test_costs_add_up() -> None:
    program, env = small(), {"T": 3, "L": 1}
    each = [c.cost(env) for c in program.calls]
    total = program.cost(env)
    assert (total.bytes, total.flops) == (sum(c.bytes for c in each), sum(c.flops for c in each))
    products = 2 * 3 * 8 * 16 * 3 * 2 + 2 * 8 * 20
    assert total.flops == products + 2 * 3 * 8  # two residual sums
    assert program.lowered(NEVER).cost(env).bytes > total.bytes, "finer ops store what coarse ones keep"


def test_views_share_storage_and_keep_symbols_in_order() -> None:
    t = Builder("p").buffer("q", "T", 4, 6)
    flat = t.view("T", 24)
    assert flat.storage is t and flat.view("T", 2, 12).storage is t
    assert flat.nbytes({"T": 5}) == t.nbytes({"T": 5}) == 5 * 24 * 4
    for wrong in (("T", 23), (24,), ("R", 24), ("T", "T", 24)):
        with pytest.raises(OpError, match=r"cannot view q: \[T, 4, 6\] f32"):
            t.view(*wrong)


def test_sizes_must_be_known() -> None:
    t = Builder("p").buffer("q", "T", 4)
    with pytest.raises(OpError, match=r"size T of tensor q is unknown; got \{'R': 1\}"):
        t.sizes({"R": 1})


@pytest.mark.parametrize("through_view", [False, True])
def test_reading_before_writing_is_refused(through_view: bool) -> None:
    b = Builder("p")
    gate, up, out = b.buffer("gate", 2, 8), b.input("up", 2, 8, dtype="f32"), b.buffer("out", 2, 8)
    b.emit(SILU_MUL, out=out, gate=gate.view(2, 8) if through_view else gate, up=up)
    with pytest.raises(OpError, match=r"program p: silu_mul\(.*\) reads gate before anything wrote it"):
        b.build()


def test_in_place_operands_are_read_too() -> None:
    b = Builder("p")
    x, a, w = b.buffer("x", 2, 8), b.input("a", 2, 4, dtype="f32"), b.weight("w", 8, 4, dtype="f32")
    b.emit(LINEAR_RESIDUAL, x=x, a=a, w=w)
    with pytest.raises(OpError, match="reads x before"):
        b.build()


def test_writing_through_a_view_counts() -> None:
    b = Builder("p")
    q, x, n = b.buffer("q", 2, 2, 4), b.input("x", 2, 8, dtype="f32"), b.weight("n", 8, dtype="f32")
    b.emit(RMS_NORM, {"eps": 1e-5}, out=q.view(2, 8), x=x, weight=n)
    b.emit(SILU_MUL, out=b.output("out", 2, 8), gate=q.view(2, 8), up=x)
    assert len(b.build().calls) == 2


def test_names_are_given_once() -> None:
    b = Builder("p")
    b.buffer("h", 2)
    with pytest.raises(OpError, match="program p: tensor h is declared twice"):
        b.output("h", 2)


def test_description_has_every_call_its_cost_and_place() -> None:
    program, env, largest = small(), {"T": 3, "L": 1}, {"T": 64, "L": 8}
    lines = program.describe(env, largest).splitlines()
    plan, total = program.plan_arena(largest), program.cost(env)
    assert lines[0] == f"small: 6 calls at T=3 L=1; arena {plan.size} bytes"
    assert len(lines) == 2 + 6 + 1
    offset = {t.name: o for t, o in plan.offsets.items()}
    operands = f"out=x[3, 8] f32 @{offset['x']}; table=table[20, 8] f32; ids=ids[3] i32"
    assert lines[2].split() == ["0", "embedding", str(2 * 96 + 12), "0", *operands.split()]
    assert f"out=act[3, 16] f32 @{offset['act']}; x=x[3, 8] f32 @{offset['x']}" in lines[3]
    assert lines[-1].split() == ["total", str(total.bytes), str(total.flops)]
    rows = program.rows(env, largest)
    assert [r.op for r in rows] == [c.spec.name for c in program.calls]
    assert sum(r.cost.bytes for r in rows) == total.bytes


def test_one_call_programs_stage_in_place_operands() -> None:
    program = one_call(LINEAR_RESIDUAL, {"T": 2, "N": 3, "K": 5}, {"x": "f32", "a": "f32", "w": "f32"}, {})
    assert [c.spec.name for c in program.calls] == ["gather_rows", "linear_residual"]
    assert [t.name for t in program.tensors(Kind.INPUT)] == ["x.staged", "staged_rows", "a"]
