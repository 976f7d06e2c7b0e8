"""The executor's own promises: errors before anything runs, views, watching, timing, sharing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError, OpError, UnsupportedError
from pegainfer.lower.cpu import kv
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.executor import Watch
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder, OpCall, Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.spec import Role
from tests.cpu.kernels.harness import FORMATS
from tests.cpu.kernels.model import BLOCK_SIZE, BLOCKS, CONFIG, LARGEST, Array, Model, Span, cache, stage

EXACT = CpuOptions(threads=2, activation="f32")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(EXACT)


def span(count: int = 5) -> Span:
    return Span(np.arange(count, dtype=np.int32), np.arange(-(-count // BLOCK_SIZE)), 0, count)


def linear_program(dtype: str = "f32") -> Program:
    b = Builder("one")
    a, out = b.input("a", "T", 64, dtype="f32"), b.output("out", "T", 20)
    b.emit(LINEAR, out=out, a=a, w=b.weight("w", 20, 64, dtype=dtype))
    return b.build()


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("token_ids", 4, CONFIG.vocab_size, r"embedding: ids\[4\]: expected 0 to 202, got 203"),
        ("token_ids", 0, -1, r"embedding: ids\[0\]: expected 0 to 202, got -1"),
        ("positions", 1, 640, r"positions\[1\]: expected 0 to 639, got 640"),
        ("kv.places", 2, BLOCKS * BLOCK_SIZE, r"slots\[2\]: expected 0 to 1535, got 1536"),
        ("logit_rows", 3, 5, r"lm_head: rows\[3\]: expected 0 to 4, got 5"),
        ("query_lens", 0, 6, r"attention: row 0 has tokens 0 to 6, expected within 5"),
        ("context_lens", 0, 4, r"context_lens\[0\]: expected 5 to 640, got 4"),
        ("context_lens", 0, 641, r"context_lens\[0\]: expected 5 to 640, got 641"),
        ("kv.block_table", (0, 0), BLOCKS, r"block_table\[0, 0\]: expected 0 to 95, got 96"),
    ],
)
def test_an_index_out_of_bounds_is_named_and_nothing_runs(
    model: Model, name: str, at: Any, value: int, message: str
) -> None:
    inputs, env = stage([span()])
    inputs[name][at] = value
    before = model.kv.tobytes()
    with pytest.raises(OpError, match=message):
        model.executor.run(inputs, env)
    assert model.kv.tobytes() == before


def test_inputs_and_sizes_are_checked(model: Model) -> None:
    inputs, env = stage([span()])
    with pytest.raises(OpError, match="size T of a step; expected 0 to 700; got 701"):
        model.executor.run({}, {**env, "T": 701})
    with pytest.raises(OpError, match="size L of a step"):
        model.executor.run({}, {"T": 5, "R": 1})
    with pytest.raises(OpError, match=r"input token_ids.*expected i32 \(5,\); got int32 \(4,\)"):
        model.executor.run({"token_ids": inputs["token_ids"][:4]}, env)
    with pytest.raises(OpError, match="got int64"):
        model.executor.run({"token_ids": inputs["token_ids"].astype(np.int64)}, env)
    with pytest.raises(OpError, match="no input tokens"):
        model.executor.run({"tokens": inputs["token_ids"]}, env)


def test_an_input_passed_again_is_read_where_it_lies(model: Model) -> None:
    other = span()
    other.ids[:] = other.ids[::-1].copy()
    want = model.logits([other])
    inputs, env = stage([span()])
    model.executor.run(inputs, env)
    inputs["token_ids"][:] = other.ids
    assert model.executor.run(inputs, env)["logits"].tobytes() == want.tobytes()


def test_an_input_of_another_size_is_looked_at_again(model: Model) -> None:
    """The same array under new sizes."""
    inputs, env = stage([span()])
    model.executor.run(inputs, env)
    with pytest.raises(OpError, match=r"input token_ids.*expected i32 \(4,\); got int32 \(5,\)"):
        model.executor.run(inputs, {**env, "T": 4})


def test_every_input_must_be_given(model: Model) -> None:
    inputs, env = stage([span()])
    model.executor.run(inputs, env)
    del inputs["positions"]
    with pytest.raises(OpError, match="no input positions"):
        model.executor.run(inputs, env)


def test_strided_inputs_are_read_right() -> None:
    """Large and small ones: some are copied, others read where they lie."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((20, 64)).astype(np.float32)
    backend = CpuBackend({"w": quantized_weight("f32", w)}, EXACT)
    executor = backend.prepare(linear_program(), {}, {"T": 300})
    for rows in (3, 300):
        wide = rng.standard_normal((rows, 128)).astype(np.float32)
        for a in (wide[:, ::2], np.ascontiguousarray(wide[:, ::2])):
            out = executor.run({"a": a}, {"T": rows})["out"]
            np.testing.assert_allclose(out, a @ w.T, rtol=1e-4, atol=1e-4)
    backend.close()


def test_watching_gives_what_the_reference_gives_call_by_call() -> None:
    """What each coarse call writes once is what the last of its finer ones writes there."""
    model = Model(EXACT, FORMATS)
    plain = {k: w.values() for k, w in model.weights.items()}
    reference = ReferenceExecutor(model.program, {**plain, "kv": np.zeros_like(model.kv)})
    inputs, env = stage([span(33)])

    def written(into: list[tuple[str, Array]], names: list[str]) -> Watch:
        def watch(call: OpCall, arrays: Mapping[str, Array]) -> None:
            names.append(call.spec.name)
            for name, tensor in call.tensors.items():
                out = call.spec.operand(name).role is Role.OUT
                if out and tensor.name in ("attn", "act", "logits") and name in arrays:
                    into.append((tensor.name, arrays[name].reshape(len(arrays[name]), -1).copy()))

        return watch

    want: list[tuple[str, Array]] = []
    got: list[tuple[str, Array]] = []
    names: list[str] = []
    reference.run(inputs, env, written(want, []))
    model.executor.run(inputs, env, written(got, names))
    assert names == [c.spec.name for c in model.executor.program.calls]
    assert [name for name, _ in got] == ["attn", "act", "attn", "act", "logits"]
    for (name, a), (other, b) in zip(got, want, strict=True):
        assert name == other
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3, err_msg=name)
    pool, held = kv.to_reference(model.kv)[:3], reference.constants["kv"][:3]
    filled = np.isfinite(pool)
    assert filled[:2].all() and filled[2].sum() == pool[2].size // BLOCK_SIZE
    np.testing.assert_allclose(pool[filled], held[filled], rtol=1e-3, atol=1e-3)


def test_calls_are_timed_on_demand(model: Model) -> None:
    with pytest.raises(ConfigError, match="not timed"):
        model.executor.timings()
    timed = Model(CpuOptions(threads=2, timing=True))
    timed.logits([span()])
    once = [ns for _, ns in timed.executor.timings()]
    assert len(once) == len(timed.executor.program.calls) and all(ns > 0 for ns in once)
    timed.logits([span()])
    assert all(b > a for a, (_, b) in zip(once, timed.executor.timings(), strict=True))
    timed.executor.reset_timings()
    assert not any(ns for _, ns in timed.executor.timings())


def test_executors_share_weights_and_threads(model: Model) -> None:
    packed = model.backend.packed_bytes
    second = model.backend.prepare(model.program, {"kv": cache(CONFIG)}, LARGEST)
    assert model.backend.packed_bytes == packed
    inputs, env = stage([span()])
    want = model.logits([span()])
    assert second.run(inputs, env)["logits"].tobytes() == want.tobytes()


def test_states_and_weights_must_be_as_declared(model: Model) -> None:
    with pytest.raises(OpError, match="no state for kv"):
        model.backend.prepare(model.program, {}, LARGEST)
    with pytest.raises(OpError, match=r"state kv; expected .* f32, C-contiguous; got float16"):
        model.backend.prepare(model.program, {"kv": cache(CONFIG, "f16")}, LARGEST)
    backend = CpuBackend({"w": quantized_weight("q8_0", np.ones((20, 64), np.float32))}, EXACT)
    with pytest.raises(OpError, match=r"expected w: \[20, 64\] f32; got q8_0 \(20, 64\)"):
        backend.prepare(linear_program(), {}, {"T": 1})
    with pytest.raises(OpError, match="no weight for w"):
        CpuBackend({}, EXACT).prepare(linear_program(), {}, {"T": 1})
    backend.close()


def test_what_has_no_kernel_is_refused_with_the_reason() -> None:
    backend = CpuBackend({}, EXACT)
    b = Builder("half")
    x, norm = b.input("x", "T", 64, dtype="f16"), b.input("norm", 64, dtype="f32")
    b.emit(RMS_NORM, {"eps": 1e-5}, out=b.output("y", "T", 64, dtype="f16"), x=x, weight=norm)
    with pytest.raises(UnsupportedError, match=r"dtype of out in rms_norm.*expected f32"):
        backend.prepare(b.build(), {}, {"T": 4})
    b = Builder("odd")
    q, out = b.input("q", "T", 2, 24, dtype="f32"), b.output("out", "T", 2, 24)
    rows = {n: b.input(n, "R") for n in ("query_starts", "query_lens", "context_lens")}
    table, pool = b.input("block_table", "R", 4), b.state("kv", 8, 1, 2, 1, 16, 24, dtype="f32")
    b.emit(ATTENTION, {"layer": 0, "scale": 1.0}, out=out, q=q, kv=pool, block_table=table, **rows)
    with pytest.raises(UnsupportedError, match=r"multiples of 16; got \[16, 24\]"):
        backend.prepare(b.build(), {}, {"T": 4, "R": 1})
    backend.close()


def test_an_empty_step_runs(model: Model) -> None:
    inputs = {name: array[:0] for name, array in stage([span()])[0].items()}
    out = model.executor.run(inputs, {"T": 0, "R": 0, "L": 0})
    assert out["logits"].shape == (0, CONFIG.vocab_size)


def test_a_step_without_wanted_logits(model: Model) -> None:
    inputs, env = stage([span()])
    inputs["logit_rows"] = inputs["logit_rows"][:0]
    assert model.executor.run(inputs, {**env, "L": 0})["x"].shape == (5, CONFIG.hidden_size)
