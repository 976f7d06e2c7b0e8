"""Rewritten steps compute what the recorded calls do, and rules apply only where their preconditions hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.plan import PlannedLaunch
from pegainfer.lower.cuda.planning import RULES, plan_step, rules
from pegainfer.lower.cuda.rewrite import Rewritten, rewrite
from pegainfer.lower.cuda.target import Target
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.forward import forward, groups
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.activation import SIGMOID_GATE
from pegainfer.ops.adapters import AdapterBounds, adapted, adapted_weights
from pegainfer.ops.cases.gated_delta import gated_delta_cases
from pegainfer.ops.cases.mla_layer import mla_qkv_cases
from pegainfer.ops.cases.moe import moe_cases
from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.compose import one_call
from pegainfer.ops.embed import GATHER_ROWS
from pegainfer.ops.fused_moe import GATED
from pegainfer.ops.gated_delta import GATED_DELTA
from pegainfer.ops.gemm import LINEAR_RESIDUAL
from pegainfer.ops.mla import MLA_ATTENTION, MLA_QKV_APPEND
from pegainfer.ops.moe import MOE
from pegainfer.ops.program import Builder, OpCall, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.sample import SAMPLE
from pegainfer.ops.spec import FUSED, Case, OpSpec, Role
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runner.program import Formats, Sizes
from pegainfer.runtime.cuda.device import DeviceInfo
from tests.support.heads import Heads, heads_program

Array = np.ndarray[Any, Any]
H100 = DeviceInfo(0, "H100", (9, 0), 132, 50 << 20, 227 << 10, 228 << 10, 80 << 30, 13000, 15)
HOPPER = Target(H100)
CONFIG = Qwen3Config(
    vocab_size=96, hidden_size=128, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
BLOCKS, WIDTH = 16, 4
ADAPTERS, RANK = 3, 4


def program(dtype: str = "bf16", ranks: int = 1) -> Program:
    """As an executor lowers it."""
    formats = dict.fromkeys(TABLE.shapes(CONFIG), dtype)
    steps = Formats(dtype, dtype, dtype)
    sizes = Sizes(groups(CONFIG, 16, steps), (BLOCKS,), 64)
    return forward(CONFIG, formats, sizes, steps).lowered(keep=keeps_whole, ranks=ranks)


def with_adapters(dtype: str = "bf16", rank: int = RANK) -> Program:
    """The same with adapters."""
    formats = dict.fromkeys(TABLE.shapes(CONFIG), dtype)
    steps = Formats(dtype, dtype, dtype)
    plain = forward(CONFIG, formats, Sizes(groups(CONFIG, 16, steps), (BLOCKS,), 64), steps)
    bounds = AdapterBounds(ADAPTERS, rank, dtype)
    return adapted(plain, adapted_weights(TABLE, CONFIG), bounds).lowered(keep=keeps_whole)


def step(rows: int, tokens: int | None = None, target: Target = HOPPER, decode_only: bool = True) -> Step:
    return Step(target, {"T": tokens or rows, "R": rows, "L": rows}, decode_only)


def rewritten(calls: Sequence[OpCall], at: Step, *, row_pass: bool = False) -> Rewritten:
    return rewrite(calls, at, rules(row_pass=row_pass))


def names(found: Rewritten) -> list[str]:
    return [call.spec.name for call, _ in found.calls]


# What rewritten calls compute


def inputs(rows: int) -> dict[str, Array]:
    """Rows of one token at contexts of their own; no two share a block."""
    contexts = 1 + 7 * np.arange(rows) % 60
    table = np.arange(rows * WIDTH).reshape(rows, WIDTH) % BLOCKS
    positions = contexts - 1
    places = np.arange(rows), positions // 16
    return {
        "token_ids": np.arange(rows) * 5 % CONFIG.vocab_size, "positions": positions,
        "kv.places": table[places] * 16 + positions % 16, "query_starts": np.arange(rows),
        "query_lens": np.ones(rows, int), "context_lens": contexts, "kv.block_table": table,
        "logit_rows": np.arange(rows)[::-1], "adapters": np.arange(rows) % (ADAPTERS + 1) - 1,
        "logit_adapters": (np.arange(rows) % (ADAPTERS + 1) - 1)[::-1],
    }  # fmt: skip


def interpret(calls: Sequence[OpCall], env: dict[str, int], given: dict[str, Array]) -> dict[str, Array]:
    """Runs the references in float64; what nobody has written is NaN. Returns all tensors by name."""
    held = {name: a.copy() for name, a in given.items()}

    def bound(t: Tensor) -> Array:
        storage = t.storage
        if storage.name not in held:
            whole = storage.dtype[0] in "iu"
            held[storage.name] = np.full(storage.sizes(env), -(1 << 20) if whole else np.nan)
            if whole:
                held[storage.name] = held[storage.name].astype(np.int32)
        return held[storage.name].reshape(t.sizes(env))

    for call in Program("interpreted", tuple(calls)).lowered(lambda c: False).calls:
        assert call.spec.reference is not None
        call.spec.reference(**{k: bound(t) for k, t in call.tensors.items()}, **call.attrs)
    return held


def constants(calls: Sequence[OpCall]) -> dict[str, Array]:
    rng = np.random.default_rng(3)
    made: dict[str, Array] = {}
    for t in Program("constants", tuple(calls)).tensors(Kind.WEIGHT, Kind.STATE):
        values = rng.standard_normal(t.sizes({}))
        scale = t.sizes({})[-1] ** -0.5 if len(t.shape) == 2 else 0.2
        made[t.name] = values * scale + (len(t.shape) == 1)
        if t.name.endswith(".ranks"):
            made[t.name] = rng.integers(0, RANK + 2, t.sizes({})).astype(np.int32)
    made["cos_sin"] = cos_sin_table(64, inverse_frequencies(64, 1e4, None)).astype(np.float64)
    return made


@pytest.mark.parametrize(("rows", "row_pass"), [(1, True), (1, False), (3, False), (4, False)], ids=str)
def test_rewritten_calls_compute_what_the_recorded_ones_do(rows: int, row_pass: bool) -> None:
    calls = program().calls
    at = step(rows)
    found = rewritten(calls, at, row_pass=row_pass)
    if row_pass:
        assert names(found) == ["decode_pass"] and found.calls[0][1] == len(calls)
    else:
        layer = ["scaled_project_heads", "append_attention", "linear_residual_norm", "scaled_gate_up_swiglu"]
        first, second = ["embedding", "project_heads", *layer[1:]], ["linear_residual_norm", *layer]
        assert names(found) == [*first, *second, "linear_residual", "lm_head"]
    env = {**at.env}
    given = {**constants(calls), **inputs(rows)}
    want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    for name in ("x", "logits", "kv"):
        assert np.isfinite(want[name]).all()
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)


def test_a_projection_with_a_folded_norm_may_append_by_itself() -> None:
    """Rows of several tokens: attention does not finish their heads."""
    calls, at = program().calls, step(2, 6, decode_only=False)
    found = rewritten(calls, at)
    assert "scaled_qkv_rope_append" in names(found) and "append_attention" not in names(found)
    env, given = {**at.env}, constants(calls)
    given |= {
        "token_ids": np.arange(6), "positions": np.array([0, 1, 2, 0, 1, 2]),
        "kv.places": np.array([0, 1, 2, 64, 65, 66]), "query_starts": np.array([0, 3]),
        "query_lens": np.array([3, 3]), "context_lens": np.array([3, 3]),
        "kv.block_table": np.arange(8).reshape(2, 4), "logit_rows": np.array([2, 5]),
    }  # fmt: skip
    want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    for name in ("x", "logits", "kv"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("rows", "several"), [(1, False), (4, False), (3, True)])
def test_layers_with_adapters_take_the_same_fused_forms(rows: int, several: bool) -> None:
    """Rows of several tokens append by themselves."""
    calls, at = with_adapters().calls, step(rows, rows * (1 + several), decode_only=not several)
    found = rewritten(calls, at, row_pass=True)
    ends = ["lora_linear_residual_norm", "lora_scaled_gate_up_swiglu"]
    heads = ["lora_scaled_qkv_rope_append", "attention"] if several else [
        "lora_scaled_project_heads", "append_attention"
    ]  # fmt: skip
    first = ["lora_qkv_norm_rope_append" if several else "lora_project_heads", heads[1]]
    got = names(found)
    assert got[:3] == ["embedding", "lora_lookup", "lora_expand"]
    assert got[3:-5] == [*first, *ends, ends[0], *heads, *ends, "lora_linear_residual"]
    env, given = {**at.env}, {**constants(calls), **inputs(rows)}
    if several:
        given |= {
            "token_ids": np.arange(6), "positions": np.array([0, 1] * 3),
            "adapters": np.array([1, 1, -1, 2, 0, 2]),
            "kv.places": np.array([0, 1, 64, 65, 128, 129]), "query_starts": np.array([0, 2, 4]),
            "query_lens": np.full(3, 2), "context_lens": np.full(3, 2), "logit_rows": np.array([1, 3, 5]),
            "kv.block_table": np.arange(12).reshape(3, 4),
        }  # fmt: skip
    want, mine = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    plain = interpret(
        calls, env, given | {n: np.full_like(given[n], -1) for n in ("adapters", "logit_adapters")}
    )
    for name in ("x", "logits", "kv"):
        assert np.isfinite(want[name]).all()
        np.testing.assert_allclose(mine[name], want[name], rtol=1e-9, atol=1e-11)
    assert rows == 1 or not np.allclose(plain["x"], want["x"])


@pytest.mark.parametrize(("rows", "rank"), [(65, RANK), (4, 144)])
def test_adapters_that_no_launch_takes_in_keep_norms_apart(rows: int, rank: int) -> None:
    found = rewritten(with_adapters(rank=rank).calls, step(rows))
    assert found.lacking["fold_norm"].startswith("GEMMs by Hopper's kernels on both sides")
    plan = plan_step(with_adapters(rank=rank).calls, step(rows), rules())
    launched = [launch.kernel for launch in plan.launches if isinstance(launch, PlannedLaunch)]
    assert launched.count("lora_shrink_bf16") == 4 * CONFIG.num_layers + 1
    assert not any(kernel.startswith("skinny_lora") for kernel in launched)


VECTORS = ("norm", "taps", "a_log", "dt_bias", "out_norm", "latent_norm", "cos_sin")


def behind_a_gemm(spec: OpSpec, case: Case) -> list[OpCall]:
    """The case's call behind the GEMM that ends the layer before it."""
    operands = [o for o in spec.operands if o.name in case.arrays or o.role is Role.OUT]
    made = {o.name: ("bf16", Kind.OUTPUT if o.role is Role.OUT else Kind.INPUT) for o in operands}
    made |= {o.name: ("bf16", Kind.WEIGHT) for o in operands if o.role is Role.WEIGHT}
    made |= {o.name: ("bf16", Kind.STATE) for o in operands if o.role is Role.STATE}
    made |= {o.name: ("f32", Kind.WEIGHT) for o in operands if o.name in VECTORS}
    made |= {o.name: ("i32", Kind.INPUT) for o in operands if o.dtypes == ("i32",)}
    made |= {"delta": ("f32", Kind.STATE), "x": ("bf16", Kind.OUTPUT)}
    tensors = {
        o.name: Tensor(o.name, tuple(a if a in "TR" else case.sizes[a] for a in o.axes), *made[o.name])
        for o in operands
    }
    width = case.sizes["M"]
    before = {"a": ("T", 64), "w": (width, 64)}
    a, w = (Tensor(n, shape, "bf16", Kind.INPUT if n == "a" else Kind.WEIGHT) for n, shape in before.items())
    return [
        OpCall.of(LINEAR_RESIDUAL, {}, x=tensors["x"], a=a, w=w),
        OpCall.of(spec, case.attrs, **tensors),
    ]


@pytest.mark.parametrize(
    ("spec", "cases", "form", "outputs"),
    [
        (GATED_DELTA, gated_delta_cases, "scaled_gated_delta", ("x", "out", "conv", "delta")),
        (MLA_QKV_APPEND, mla_qkv_cases, "scaled_mla_qkv_append", ("x", "q", "kv")),
    ],
)
def test_a_layer_takes_a_folded_norm(
    spec: OpSpec, cases: Callable[[np.random.Generator], list[Case]], form: str, outputs: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(11)
    seen = 0
    for case in cases(rng):
        calls = behind_a_gemm(spec, case)
        if case.sizes["M"] % 8 or " normal" not in case.label or not keeps_whole(calls[1]):
            continue
        tokens = case.sizes["T"]
        env = {"T": tokens, "R": case.sizes.get("R", 1)}
        found = rewritten(calls, Step(HOPPER, env, False))
        assert names(found) == ["linear_residual_norm", form]
        given = {name: a if a.dtype.kind == "i" else a.astype(np.float64) for name, a in case.arrays.items()}
        given |= {"a": rng.standard_normal((tokens, 64)), "w": rng.standard_normal((case.sizes["M"], 64))}
        want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
        for name in outputs:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)
        seen += 1
    assert seen >= 2


MLA = {
    "M": 64, "H": 2, "F": 192, "A": 384, "X": 64, "D": 576, "K": 512, "B": 64, "P": 64, "N": 9, "Y": 2,
    "S": 16, "W": 3, "R": 3, "T": 3,
}  # fmt: skip


def latent_layer() -> tuple[list[OpCall], dict[str, Array]]:
    """Latent attention of three rows of one token behind a GEMM, and what it is given."""
    rng = np.random.default_rng(4)
    made: dict[str, Tensor] = {}

    def tensors(spec: OpSpec, sizes: dict[str, int]) -> dict[str, Tensor]:
        for o in spec.operands:
            kind = Kind.WEIGHT if o.role is Role.WEIGHT or o.name in VECTORS else Kind.INPUT
            kind = {"kv": Kind.STATE, "q": Kind.BUFFER, "x": Kind.OUTPUT, "out": Kind.OUTPUT}.get(
                o.name, kind
            )
            dtype = "i32" if o.dtypes == ("i32",) else "f32" if o.name in VECTORS else "bf16"
            shape = tuple(a if a in "TR" else sizes[a] for a in o.axes)
            if o.name not in ("wq_down", "q_norm"):
                made.setdefault(o.name, Tensor(o.name, shape, dtype, kind))
        return {o.name: made[o.name] for o in spec.operands if o.name in made}

    qkv = tensors(MLA_QKV_APPEND, MLA)
    attention = tensors(MLA_ATTENTION, MLA | {"A": 128, "X": 128})
    a, w = Tensor("a", ("T", 64), "bf16", Kind.INPUT), Tensor("w", (64, 64), "bf16", Kind.WEIGHT)
    contexts = np.array([5, 17, 40])
    table = np.arange(9).reshape(3, 3)
    given: dict[str, Array] = {
        t.name: rng.standard_normal([MLA.get(d, d) for d in t.shape]) * 0.3
        for t in (*made.values(), a, w)
        if t.dtype != "i32" and t.kind is not Kind.BUFFER
    }
    given |= {
        "positions": contexts - 1, "slots": table[range(3), (contexts - 1) // 16] * 16 + (contexts - 1) % 16,
        "query_starts": np.arange(3), "query_lens": np.ones(3, int), "context_lens": contexts,
        "block_table": table,
    }  # fmt: skip
    return [
        OpCall.of(LINEAR_RESIDUAL, {}, x=made["x"], a=a, w=w),
        OpCall.of(MLA_QKV_APPEND, {"eps": 1e-6, "latent_eps": 1e-5, "layer": 1}, **qkv),
        OpCall.of(MLA_ATTENTION, {"layer": 1, "scale": 0.1}, **attention),
    ], given


def test_queries_of_decoded_tokens_go_from_their_gemm_to_absorption() -> None:
    calls, given = latent_layer()
    env = {"T": 3, "R": 3}
    found = rewritten(calls, Step(HOPPER, env, True))
    assert names(found) == ["linear_residual_norm", "scaled_mla_decode"]
    want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    for name in ("x", "out", "kv"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)
    chunks = rewritten(calls, Step(HOPPER, env, False))
    assert names(chunks) == ["linear_residual_norm", "scaled_mla_qkv_append", "mla_attention"]
    assert chunks.lacking["join_mla"] == "rows of one token each"


def test_rows_without_options_are_drawn_from_their_logits() -> None:
    assert SAMPLE.cases is not None
    plain = 0
    for case in SAMPLE.cases(np.random.default_rng(5)):
        dtypes = {o.name: o.dtypes[0] for o in SAMPLE.operands}
        calls = one_call(SAMPLE, case.sizes, dtypes, case.attrs).lowered(keep=keeps_whole).calls
        found = rewritten(calls, Step(HOPPER, case.sizes, False))
        assert {"adjust_some_logits", "sample_some_tokens"} <= set(names(found))
        want, got = (
            interpret(c, case.sizes, dict(case.arrays)) for c in (calls, [call for call, _ in found.calls])
        )
        for name in ("tokens", "status", "history", "ranks"):
            np.testing.assert_array_equal(got[name], want[name])
        plain += sum(int(a.sum()) for name, a in got.items() if name.startswith("plain"))
    assert plain > 0


# When rules apply


def test_a_step_of_many_rows_folds_no_norm() -> None:
    found = rewritten(program().calls, step(300))
    assert names(found) == [c.spec.name for c in program().calls]
    assert found.lacking["fold_norm"].startswith("GEMMs by Hopper's kernels on both sides")


def test_halves_fold_no_norm() -> None:
    found = rewritten(program("f16").calls, step(2))
    assert found.lacking["fold_norm"] == "activations of bf16, not f16"
    assert "append_attention" in names(found)


def test_other_architectures_keep_the_recorded_calls() -> None:
    ada = Target(replace(H100, capability=(8, 9), name="L40S", max_shared=99 << 10, shared_per_sm=100 << 10))
    calls = program().calls
    found = rewritten(calls, step(2, target=ada), row_pass=True)
    assert names(found) == [c.spec.name for c in calls] and not found.applied
    assert found.lacking["finish_heads_in_attention"] == "a Hopper GPU, not L40S"


def test_what_stands_between_two_calls_keeps_them_apart() -> None:
    """A copy of the residual stream after each reduction, as a collective or an adapter would stand there."""
    calls = []
    for call in program().calls:
        calls.append(call)
        if call.spec.name == "linear_residual":
            x = call.tensors["x"]
            copy = Tensor("copy", x.shape, x.dtype, Kind.BUFFER)
            rows = Tensor("rows", ("T",), "i32", Kind.INPUT)
            calls.append(OpCall.of(GATHER_ROWS, {}, out=copy, x=x, rows=rows))
    found = rewritten(calls, step(1), row_pass=True)
    assert set(found.applied) == {"finish_heads_in_attention"}


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({"layer": 1}, "attention over the same heads and the same layer's cache"),
        ({"times": 2}, "heads that only attention reads"),
    ],
    ids=str,
)
def test_heads_are_left_to_the_only_attention_that_reads_them(change: dict[str, int], lacking: str) -> None:
    calls = heads_program(Heads(), **change).lowered(keep=keeps_whole).calls
    found = rewritten(calls, Step(HOPPER, {"T": 1, "R": 1}, True))
    assert found.lacking["finish_heads_in_attention"] == lacking


def test_a_gate_is_projected_beside_the_heads() -> None:
    shape = Heads(norms=True, gated=True)
    calls = heads_program(shape).lowered(keep=keeps_whole).calls
    env = {"T": 3, "R": 3}
    found = rewritten(calls, Step(HOPPER, env, True))
    assert names(found) == ["project_heads", "append_attention", "gate_heads"]
    rng = np.random.default_rng(2)
    given = {t.name: rng.standard_normal(t.sizes(env)) for t in Program("all", calls).tensors()}
    given |= {
        "positions": np.array([0, 16, 40]), "slots": np.array([0, 16, 40]), "query_starts": np.arange(3),
        "query_lens": np.ones(3, int), "context_lens": np.array([1, 17, 41]),
        "block_table": np.array([[0] * 4, [3, 1, 0, 0], [3, 1, 2, 0]]),
        "cos_sin": cos_sin_table(64, inverse_frequencies(64, 1e4, None)).astype(np.float64),
    }  # fmt: skip
    want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    for name in ("out", "kv"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)


def test_a_gate_that_is_read_again_is_kept() -> None:
    calls = list(heads_program(Heads(gated=True)).lowered(keep=keeps_whole).calls)
    gate, out = calls[0].tensors["gate"], calls[2].tensors["x"]
    found = rewritten(
        [*calls, OpCall.of(SIGMOID_GATE, {}, x=out, gate=gate)], Step(HOPPER, {"T": 1, "R": 1}, True)
    )
    assert found.lacking["finish_and_gate_heads"] == "a gate that nothing else reads"
    other = OpCall.of(SIGMOID_GATE, {}, x=out, gate=Tensor("other", gate.shape, gate.dtype, Kind.INPUT))
    found = rewritten([*calls[:2], other], Step(HOPPER, {"T": 1, "R": 1}, True))
    assert found.lacking["finish_and_gate_heads"] == "a gate of what attention leaves"


def experts(case: Case) -> list[OpCall]:
    """The case's experts, whose sum is added to the residual stream, in bf16."""
    made = {o.name: ("bf16", Kind.WEIGHT if o.role is Role.WEIGHT else Kind.BUFFER) for o in MOE.operands}
    made |= {"out": ("f32", Kind.BUFFER), "norm": ("f32", Kind.WEIGHT), "bias": ("f32", Kind.WEIGHT)}
    made |= {"experts": ("i32", Kind.BUFFER), "x": ("bf16", Kind.OUTPUT)}
    tensors = {
        o.name: Tensor(o.name, tuple(a if a == "T" else case.sizes[a] for a in o.axes), *made[o.name])
        for o in MOE.operands
        if o.name != "bias" or "bias" in case.arrays
    }
    return [
        OpCall.of(MOE, case.attrs, **tensors),
        OpCall.of(REDUCE_RESIDUAL, {}, x=tensors["x"], partial=tensors["out"]),
    ]


def test_experts_are_added_to_the_residual_stream() -> None:
    seen = 0
    for case in moe_cases(np.random.default_rng(12)):
        calls, env = experts(case), {"T": case.sizes["T"]}
        if " normal" not in case.label or not env["T"] or not keeps_whole(calls[0]):
            continue
        found = rewritten(calls, Step(HOPPER, env, False))
        assert names(found) == ["moe_residual"]
        given = {name: a if a.dtype.kind == "i" else a.astype(np.float64) for name, a in case.arrays.items()}
        want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
        assert np.isfinite(want["x"]).all() and (want["x"] != given["x"]).any()
        np.testing.assert_allclose(got["x"], want["x"], rtol=1e-9, atol=1e-11)
        np.testing.assert_array_equal(got["experts"], want["experts"])
        seen += 1
    assert seen >= 3


def few_experts(shared: str = "", dtype: str = "bf16") -> list[OpCall]:
    """Experts, a shared one beside them ('plain' or 'gated'), their sums, a norm and projections."""
    m, f, n, k = 128, 64, 8, 2
    width = f if shared == "gated" else 2 * f
    b = Builder("experts")
    x, partial = b.output("x", "T", m, dtype="bf16"), b.buffer("partial", "T", m)
    chosen = b.buffer("chosen", "T", k, dtype="i32")
    norm, after = b.weight("norm", m, dtype="f32"), b.weight("after", m, dtype="f32")
    shapes = {"router": (n, m), "gate": (n, f, m), "up": (n, f, m), "down": (n, m, f)}
    w = {f"w_{name}": b.weight(name, *shape, dtype="bf16") for name, shape in shapes.items()}
    stack = (1,) if shared == "gated" else ()
    shapes = {"w_gate": (width, m), "w_up": (width, m), "w_down": (m, width)}
    one = {name: b.weight(f"shared.{name}", *stack, *shape, dtype=dtype) for name, shape in shapes.items()}
    common, routing = {"x": x, "norm": norm}, {"eps": 1e-6, **GATED, "sigmoid": False, "renormalize": True}
    act, down = b.buffer("act", "T", width, dtype="bf16"), one["w_down"]
    if shared == "plain":
        del one["w_down"]
        b.emit(GATE_UP_SWIGLU, {"eps": 1e-6}, out=act, **one, **common)
    b.emit(MOE, routing, out=partial, experts=chosen, **w, **common)
    if shared == "gated":
        only, other = b.buffer("only", "T", 1, dtype="i32"), b.buffer("other", "T", m)
        router = b.weight("shared.router", 1, m, dtype="bf16")
        b.emit(MOE, {"eps": 1e-6, **GATED}, out=other, experts=only, w_router=router, **one, **common)
        b.emit(REDUCE_RESIDUAL, x=x, partial=other)
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    if shared == "plain":
        b.emit(LINEAR_RESIDUAL, x=x, a=act, w=down)
    sides = {f"w_{name}": b.weight(f"next.{name}", 64, m, dtype="bf16") for name in ("gate", "up")}
    out = b.output("out", "T", 64, dtype="bf16")
    b.emit(GATE_UP_SWIGLU, {"eps": 1e-6}, out=out, x=x, norm=after, **sides)
    return b.calls


@pytest.mark.parametrize("shared", ["", "plain", "gated"])
def test_a_few_tokens_experts_are_one_call_with_what_surrounds_them(shared: str) -> None:
    calls, env = few_experts(shared), {"T": 3}
    found = rewritten(calls, Step(HOPPER, env, True))
    assert names(found) == ["moe_residual_norm", "scaled_gate_up_swiglu"]
    given = constants(calls) | {"x": np.random.default_rng(5).standard_normal((3, 128))}
    want, got = (interpret(c, env, given) for c in (calls, [call for call, _ in found.calls]))
    for name in ("x", "out"):
        assert np.isfinite(want[name]).all()
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-11)
    np.testing.assert_array_equal(got["chosen"], want["chosen"])


def with_another_norm(calls: list[OpCall]) -> list[OpCall]:
    """The shared expert's call reads x through another norm."""
    shared = next(c for c in calls if any(t.name == "shared.w_gate" for t in c.tensors.values()))
    other = structs.replace(shared.tensors["norm"], name="another norm")
    changed = structs.replace(shared, tensors=shared.tensors | {"norm": other})
    return [changed if c is shared else c for c in calls]


@pytest.mark.parametrize(("shared", "rule"), [("plain", "add_shared_expert"), ("gated", "add_gated_expert")])
def test_a_shared_expert_stays_apart_where_one_kernel_does_not_take_it(shared: str, rule: str) -> None:
    few, several = Step(HOPPER, {"T": 3}, True), Step(replace(HOPPER, ranks=2), {"T": 3}, True)
    for calls, at, lacking in (
        (few_experts(shared), Step(HOPPER, {"T": 9}, True), "one rank and a few tokens on Hopper, not 9"),
        (few_experts(shared), several, "one rank and a few tokens on Hopper, not 3"),
        (few_experts(shared, "f32"), few, "a shared expert in bf16"),
        (with_another_norm(few_experts(shared)), few, "a shared expert of the same x, through the same norm"),
    ):
        found = rewritten(calls, at)
        assert (found.lacking[rule], found.applied.get(rule)) == (lacking, None)


def test_every_fused_form_has_a_rule_that_makes_it() -> None:
    made = set(names(rewritten(few_experts(), Step(HOPPER, {"T": 2}, True))))
    layer = experts(next(c for c in moe_cases(np.random.default_rng(1)) if keeps_whole(experts(c)[0])))
    made |= set(names(rewritten(layer, Step(HOPPER, {"T": 1}, False))))
    for calls, at in ((program().calls, step(2)), (program().calls, step(2, 6, decode_only=False))):
        made |= set(names(rewritten(calls, at)))
    for at in (step(2), step(2, 6, decode_only=False)):
        made |= set(names(rewritten(with_adapters().calls, at)))
    several = step(2, target=replace(HOPPER, ranks=2))
    made |= set(names(rewritten(program(ranks=2).calls, several)))
    rng = np.random.default_rng(1)
    for spec, cases in ((GATED_DELTA, gated_delta_cases(rng)), (MLA_QKV_APPEND, mla_qkv_cases(rng))):
        case = next(c for c in cases if keeps_whole(behind_a_gemm(spec, c)[1]))
        env = {"T": case.sizes["T"], "R": case.sizes.get("R", 1)}
        made |= set(names(rewritten(behind_a_gemm(spec, case), Step(HOPPER, env, False))))
    decoded, _ = latent_layer()
    env = {"T": 3, "R": 3}
    made |= set(names(rewritten(decoded[1:], Step(HOPPER, env, True))))
    made |= set(names(rewritten(decoded, Step(HOPPER, env, True))))
    gated = heads_program(Heads(gated=True)).lowered(keep=keeps_whole).calls
    made |= set(names(rewritten(gated, Step(HOPPER, {"T": 1, "R": 1}, True))))
    sizes = {"L": 1, "V": 64, "I": 2, "Z": 1, "X": 8, "K": 1, "J": 0, "E": 0, "U": 0, "O": 0}
    sampler = one_call(SAMPLE, sizes, {o.name: o.dtypes[0] for o in SAMPLE.operands}, {"vocab_size": 60})
    made |= set(names(rewritten(sampler.lowered(keep=keeps_whole).calls, Step(HOPPER, sizes, False))))
    assert set(FUSED) <= made and len({rule.name for rule in RULES}) == len(RULES)


# Plans


def test_a_plan_is_the_same_each_time_and_asks_no_driver() -> None:
    calls, at = program().calls, step(3)
    plans = [plan_step(calls, at, rules()) for _ in range(2)]
    assert str(plans[0]) == str(plans[1])
    assert plans[0].counts() == [1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]
    assert [launch.kernel for launch in plans[0].ahead] == ["attention_plan"]
    assert all(launch.why for launch in plans[0].launches)


def test_calls_that_one_launch_stands_for_have_none_of_their_own() -> None:
    plan = plan_step(program().calls, step(1), rules())
    assert plan.counts() == [1] + [0] * 11 and plan.applied == {"decode_pass": 1}
    assert plan.zeroed == {"row pass"}
