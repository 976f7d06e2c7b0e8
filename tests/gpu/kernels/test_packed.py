"""GEMMs and tables of quantised weights that stay packed, against float32 on the dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.gemm import GemmProblem, choose_gemm
from pegainfer.lower.cuda.lowering import Step, keeps_whole
from pegainfer.lower.cuda.packed import ExpandChoice, PackedChoice
from pegainfer.lower.cuda.planning import plan_step, rules
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD
from pegainfer.ops.compose import one_call
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.program import Builder
from pegainfer.ops.quantize import quantized_weight
from pegainfer.runtime.cuda.packed import OF_FORMAT
from pegainfer.runtime.weights.weight import Weight
from tests.gpu.harness import EAGER, raw, rounded, run_once, sized

Array = np.ndarray[Any, Any]
FORMATS = tuple(OF_FORMAT)
MAIN = ("q4_1", "q8_0", "int4_g128")  # one of each kind of scale and of level
SUPERBLOCKS = ("q4_k", "q5_k", "q6_k")
M = sized((1, 3, 8, 9, 16, 17, 33, 64, 65, 128, 200, 300), (1, 9, 17, 64, 65))
# (N, K): sizes that tiles divide and that they do not, one tile, and Qwen3-4B's
SHAPES = sized(((2560, 4096), (6144, 2560), (576, 1536), (1000, 640), (24, 256), (7, 512)), ((201, 768),))


def relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def weight(rng: np.random.Generator, n: int, k: int, format_name: str) -> tuple[Weight, Array]:
    """A quantised matrix whose rows differ in size and centre, and its values."""
    size = np.exp(rng.standard_normal((n, 1)) / 2) * k**-0.5
    values = (rng.standard_normal((n, k)) + rng.standard_normal((n, 1)) / 4) * size
    w = quantized_weight(format_name, values.astype(np.float32))
    return w, w.values()


def gated(gate: Array, up: Array) -> Array:
    """SwiGLU of projections that are rounded to bf16 before."""
    g, u = rounded(gate.astype(np.float32), "bf16"), rounded(up.astype(np.float32), "bf16")
    activated: Array = g / (1 + np.exp(-g)) * u
    return activated


def columns(k: int, format_name: str) -> int:
    """K, or the next multiple of a superblock."""
    step = 256 if format_name in SUPERBLOCKS else 128
    return -(-k // step) * step


@pytest.mark.parametrize("format_name", MAIN)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [LINEAR, LINEAR_RESIDUAL], ids=lambda s: s.name)
def test_products(spec: Any, shape: tuple[int, int], format_name: str, ctx: CudaContext) -> None:
    n, k = shape[0], columns(shape[1], format_name)
    rng = np.random.default_rng(n + k)
    w, dense = weight(rng, n, k, format_name)
    for m in M:
        a = rounded(rng.standard_normal((m, k), np.float32) + 0.5, "bf16")
        x = rounded(rng.standard_normal((m, n), np.float32), "bf16")
        out = "out" if spec is LINEAR else "x"
        sizes = {"T": m, "N": n, "K": k}
        program = one_call(spec, sizes, {out: "bf16", "a": "bf16", "w": format_name}, {})
        inputs = {"a": a}
        if spec is LINEAR_RESIDUAL:
            inputs |= {"x.staged": x, "staged_rows": np.arange(m, dtype=np.int32)}
        got = run_once(ctx, program, {"w": w}, {}, inputs, sizes)[out]
        want = a @ dense.T + (x if spec is LINEAR_RESIDUAL else 0)
        assert relative(got, want) < 3e-3, f"m = {m}"


@pytest.mark.parametrize("format_name", FORMATS)
def test_sums_are_as_near_as_float32(format_name: str, ctx: CudaContext) -> None:
    """Logits are float32, so that nothing but the order of the sums differs; also of a few columns only."""
    for m, n, k in ((3, 200, 1024), (40, 130, columns(288, format_name))):
        rng = np.random.default_rng(m)
        w, dense = weight(rng, n, k, format_name)
        a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
        sizes = {"T": m, "N": n, "K": k}
        program = one_call(LINEAR, sizes, {"out": "f32", "a": "bf16", "w": format_name}, {})
        got = run_once(ctx, program, {"w": w}, {}, {"a": a}, sizes)["out"]
        assert relative(got, a.astype(np.float64) @ dense.T.astype(np.float64)) < 2e-5


@pytest.mark.parametrize("k", [32, 96, 160, 288, 608])
def test_rows_that_end_within_a_tile(k: int, ctx: CudaContext) -> None:
    for format_name in ("q4_1", "q8_0", "int4_g32"):
        rng = np.random.default_rng(k)
        w, dense = weight(rng, 50, k, format_name)
        a = rounded(rng.standard_normal((5, k), np.float32), "bf16")
        sizes = {"T": 5, "N": 50, "K": k}
        program = one_call(LINEAR, sizes, {"out": "f32", "a": "bf16", "w": format_name}, {})
        got = run_once(ctx, program, {"w": w}, {}, {"a": a}, sizes)["out"]
        assert relative(got, a @ dense.T) < 2e-5


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 65, 201, 300])
def test_norm_and_gated_activation(m: int, ctx: CudaContext) -> None:
    for format_name, f in (("q4_1", sized(9728, 608)), ("q8_0", 70), ("q4_k", 130), ("q6_k", 96)):
        k = sized(2560, 512)
        rng = np.random.default_rng(m)
        x = rounded(rng.standard_normal((m, k), np.float32) * 3, "bf16")
        norm = (1 + rng.standard_normal(k) / 4).astype(np.float32)
        (gate, g_dense), (up, u_dense) = (weight(rng, f, k, format_name) for _ in "gu")
        sizes = {"T": m, "F": f, "M": k}
        dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": format_name, "w_up": format_name}
        program = one_call(GATE_UP_SWIGLU, sizes, dtypes, {"eps": 1e-6})
        got = run_once(ctx, program, {"w_gate": gate, "w_up": up}, {}, {"x": x, "norm": norm}, sizes)["out"]
        h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm
        assert relative(got, gated(h @ g_dense.T, h @ u_dense.T)) < 8e-3, format_name


@pytest.mark.parametrize("m", [1, 8, 33, 70, 128, 256, 300])
def test_a_norm_after_a_residual_is_handed_over(m: int, ctx: CudaContext) -> None:
    """The first product leaves what the second's norm needs, whichever of them has a packed weight."""
    width, f, k = sized((2560, 1216, 4096), (640, 304, 1024))
    rng = np.random.default_rng(m)
    a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
    x = rounded(rng.standard_normal((m, width), np.float32) * 3, "bf16")
    norm = (1 + rng.standard_normal(width) / 4).astype(np.float32)
    for first, second in (("q4_1", "q4_1"), ("int4_g128", "q8_0"), ("q4_0", "bf16"), ("bf16", "q4_1")):
        made = {"wo": (width, k, first), "gate": (f, width, second), "up": (f, width, second)}
        weights, dense = dict[str, Weight](), dict[str, Array]()
        for name, (rows, across, format_name) in made.items():
            values = rng.standard_normal((rows, across), np.float32) * np.float32(across**-0.5)
            weights[name] = quantized_weight(format_name, values)
            dense[name] = weights[name].values()
        b = Builder("handed")
        stream = b.output("x", "T", width, dtype="bf16")
        wx = b.weight("unit", width, width, dtype="bf16")
        b.emit(LINEAR, out=stream, a=b.input("x0", "T", width, dtype="bf16"), w=wx)
        wo = b.weight("wo", width, k, dtype=first)
        b.emit(LINEAR_RESIDUAL, x=stream, a=b.input("a", "T", k, dtype="bf16"), w=wo)
        b.emit(
            GATE_UP_SWIGLU, {"eps": 1e-6}, out=b.output("out", "T", f, dtype="bf16"), x=stream,
            norm=b.weight("norm", width, dtype="f32"), w_gate=b.weight("gate", f, width, dtype=second),
            w_up=b.weight("up", f, width, dtype=second),
        )  # fmt: skip
        weights |= {"unit": raw(np.eye(width, dtype=np.float32), "bf16"), "norm": raw(norm, "f32")}
        program = b.build()
        got = run_once(ctx, program, weights, {}, {"x0": x, "a": a}, {"T": m})
        assert relative(got["x"], x + a @ dense["wo"].T) < 3e-3
        h = got["x"] / np.sqrt(np.mean(got["x"] ** 2, axis=1, keepdims=True) + 1e-6) * norm
        assert relative(got["out"], gated(h @ dense["gate"].T, h @ dense["up"].T)) < 8e-3, (first, second)
        if (first, second) == ("q4_1", "q4_1"):
            step = Step(ctx.target, {"T": m}, False)
            plan = plan_step(program.lowered(keep=keeps_whole).calls, step, rules())
            assert plan.applied.get("fold_norm", 0) == (1 if m <= 256 else 0)


@pytest.mark.parametrize("m", [1, 13, 70, 300])
def test_logits_and_embeddings_of_one_table(m: int, ctx: CudaContext) -> None:
    v, k, tokens = sized(3011, 1011), sized(1024, 256), m + 26
    for format_name in ("q8_0", "q4_1", "q5_k"):
        rng = np.random.default_rng(m)
        table, dense = weight(rng, v, k, format_name)
        x = rounded(rng.standard_normal((tokens, k), np.float32), "bf16")
        rows = rng.permutation(tokens)[:m].astype(np.int32)
        sizes = {"T": tokens, "L": m, "M": k, "V": v}
        dtypes = {"logits": "f32", "x": "bf16", "rows": "i32", "norm": "f32", "w": format_name}
        program = one_call(LM_HEAD, sizes, dtypes, {"eps": 1e-6})
        inputs = {"x": x, "rows": rows, "norm": np.ones(k, np.float32)}
        got = run_once(ctx, program, {"w": table}, {}, inputs, sizes)["logits"]
        h = x[rows] / np.sqrt(np.mean(x[rows] ** 2, axis=1, keepdims=True) + 1e-6)
        assert relative(got, h @ dense.T) < 4e-3
        ids = np.array([0, v - 1, v // 2, 7, -1, v], np.int32)
        dtypes = {"out": "bf16", "ids": "i32", "table": format_name}
        program = one_call(EMBEDDING, {"T": 6, "V": v, "M": k}, dtypes, {})
        got = run_once(ctx, program, {"table": table}, {}, {"ids": ids}, {"T": 6})["out"]
        assert np.array_equal(got[:4], rounded(dense[ids[:4]], "bf16"))
        assert not got[4:].any()


def test_weights_arrive_in_pieces(ctx: CudaContext) -> None:
    """A matrix that fills several slots of the ring, and three of unequal rows as one."""
    rng = np.random.default_rng(0)
    k = 1024
    parts = [weight(rng, n, k, "q4_0") for n in (sized(20_000, 17_000), 40, 24)]
    backend = CudaBackend(ctx, {f"w{i}": w for i, (w, _) in enumerate(parts)}, EAGER)
    b = Builder("pieces")
    for i, (w, _) in enumerate(parts):
        out = b.output(f"out{i}", "T", w.shape[0], dtype="f32")
        given = b.input(f"a{i}", "T", k, dtype="bf16")
        b.emit(LINEAR, out=out, a=given, w=b.weight(f"w{i}", w.shape[0], k, dtype="q4_0"))
    executor = backend.prepare(b.build(), {}, {"T": 2})
    backend.load()
    a = rounded(rng.standard_normal((2, k), np.float32), "bf16")
    got = executor.run({f"a{i}": a for i in range(3)}, {"T": 2})
    for i, (_, dense) in enumerate(parts):
        assert relative(got[f"out{i}"].numpy(ctx.stream), a @ dense.T) < 2e-5


def test_the_choice_follows_the_rows(ctx: CudaContext) -> None:
    few = choose_gemm(GemmProblem(16, 6144, 2560, "bf16", form="int4_g128"), ctx.target)
    assert isinstance(few, PackedChoice) and few.kernel == "packed_int4_g128_16"
    many = choose_gemm(GemmProblem(1024, 6144, 2560, "bf16", form="int4_g128"), ctx.target)
    assert isinstance(many, ExpandChoice)
