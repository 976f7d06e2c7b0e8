"""GEMMs with FP8 weights against float32 of the values that the codes mean.

Up to 32 rows activations keep all bits of bf16, so the bound is that of bf16 weights: roundings of the
output, and of the gate and up projections. With more rows they are quantised, by 2^-4 of a value at the most
(half a step of three bits of fraction) and evenly spread: 2^-4 / sqrt(3) · 0.72 = 0.026 of a sum's norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.fp8 import COLUMNS, Fp8Choice
from pegainfer.lower.cuda.gemm import GemmProblem, choose_gemm
from pegainfer.lower.cuda.skinny import MAX_FP8_TOKENS, SkinnyChoice
from pegainfer.lower.cuda.target import Tuned, Tuning
from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.compose import one_call
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.program import Builder
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.spec import OpSpec
from pegainfer.runtime.weights.weight import Weight
from tests.gpu.harness import EAGER, raw, rounded, run_once, sized

Array = np.ndarray[Any, Any]
FORMS = ("fp8_r128", "fp8_g128")
M = sized((1, 3, 8, 9, 16, 17, 33, 64, 65, 128, 129, 300), (1, 9, 17, 33, 65, 130))
# (N, K): Qwen3-4B's o, down and qkv, and sizes that no tile divides
SHAPES = sized(
    ((2560, 4096), (2560, 9728), (6144, 2560), (1000, 640), (8, 4096), (24, 128)), ((320, 2048), (24, 128))
)
BF16, BOTH = 4e-3, 4e-2  # relative errors: of 16-bit activations, and of quantised ones


def bound(m: int) -> float:
    return BF16 if m <= MAX_FP8_TOKENS else BOTH


def relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def weight(rng: np.random.Generator, n: int, k: int, form: str) -> Weight:
    """Rows of very different sizes, and groups of columns too where each has a scale."""
    w = rng.standard_normal((n, k)) * k**-0.5 * np.exp2(rng.integers(-3, 4, (n, 1)))
    if form.startswith("fp8_g"):
        w = w * np.repeat(np.exp2(rng.integers(-3, 4, (n, k // 128))), 128, 1)
    return quantized_weight(form, w.astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [LINEAR, LINEAR_RESIDUAL], ids=lambda s: s.name)
def test_products(spec: OpSpec, shape: tuple[int, int], form: str, ctx: CudaContext) -> None:
    n, k = shape
    rng = np.random.default_rng(n + k)
    w = weight(rng, n, k, form)
    values = w.values()
    for m in M:
        a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
        x = rounded(rng.standard_normal((m, n), np.float32), "bf16")
        out = "out" if spec is LINEAR else "x"
        program = one_call(spec, {"T": m, "N": n, "K": k}, {out: "bf16", "a": "bf16", "w": form}, {})
        inputs = {"a": a, "x.staged": x, "staged_rows": np.arange(m, dtype=np.int32)}
        inputs = inputs if spec is LINEAR_RESIDUAL else {"a": a}
        got = run_once(ctx, program, {"w": w}, {}, inputs, {"T": m, "N": n, "K": k})[out]
        want = a @ values.T + (x if spec is LINEAR_RESIDUAL else 0)
        assert relative(got, want) < bound(m), f"m = {m}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_tiles_of_every_size(
    columns: int, form: str, ctx: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that no side of the matrix fills, with and without splits of k."""
    n, k, m = 1000, 1152, 300
    rng = np.random.default_rng(columns)
    w = weight(rng, n, k, form)
    a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
    x = rounded(rng.standard_normal((m, n), np.float32), "bf16")
    want = x + a @ w.values().T
    program = one_call(LINEAR_RESIDUAL, {"T": m, "N": n, "K": k}, {"x": "bf16", "a": "bf16", "w": form}, {})
    inputs = {"a": a, "x.staged": x, "staged_rows": np.arange(m, dtype=np.int32)}
    for splits in (1, 2):
        numbers = {"columns": columns, "splits": splits}
        tuned = Tuned("", ctx.target.info.arch, "fp8", {"n": n, "k": k}, m, numbers)
        monkeypatch.setattr(ctx, "target", replace(ctx.target, tuning=Tuning((tuned,))))
        got = run_once(ctx, program, {"w": w}, {}, inputs, {"T": m, "N": n, "K": k})["x"]
        assert relative(got, want) < BOTH, f"{splits} splits"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 65, 128, 201])
def test_norm_and_gated_activation_fused(m: int, form: str, ctx: CudaContext) -> None:
    f, k = sized((9728, 2560), (608, 640))
    rng = np.random.default_rng(m)
    x = rounded(rng.standard_normal((m, k), np.float32) * 3, "bf16")
    norm = (1 + rng.standard_normal(k) / 4).astype(np.float32)
    weights = {name: weight(rng, f, k, form) for name in ("w_gate", "w_up")}
    sizes = {"T": m, "F": f, "M": k}
    dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": form, "w_up": form}
    program = one_call(GATE_UP_SWIGLU, sizes, dtypes, {"eps": 1e-6})
    got = run_once(ctx, program, weights, {}, {"x": x, "norm": norm}, sizes)["out"]
    h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm
    g = h @ weights["w_gate"].values().T
    want = g / (1 + np.exp(-g)) * (h @ weights["w_up"].values().T)
    assert relative(got, want) < 2 * bound(m)


@pytest.mark.parametrize("m", [1, 40, 100])
@pytest.mark.parametrize("form", FORMS)
def test_activations_of_all_sizes(form: str, m: int, ctx: CudaContext) -> None:
    """Zeros, a row of which one value is huge, rows beside each other that differ by 2^40: no row is moved by
    another, nothing overflows, and zeros stay zeros. Sums of codes, up to 448 each, are scaled afterwards, so
    that values beyond 1e33 would overflow where bf16 weights take them."""
    n, k = 264, 512
    rng = np.random.default_rng(5)
    w = weight(rng, n, k, form)
    a = rng.standard_normal((m, k), np.float32) * np.exp2(rng.integers(-20, 21, (m, 1))).astype(np.float32)
    a[0] = 0
    if m > 2:
        a[1] = 1e-3
        a[1, 77] = 3e4
        a[2] = 1e35 / k
    a = rounded(a, "bf16")
    program = one_call(LINEAR, {"T": m, "N": n, "K": k}, {"out": "f32", "a": "bf16", "w": form}, {})
    got = run_once(ctx, program, {"w": w}, {}, {"a": a}, {"T": m, "N": n, "K": k})["out"]
    want = a.astype(np.float64) @ w.values().astype(np.float64).T
    assert not got[0].any()
    for row in range(1, m):
        assert relative(got[row], want[row]) < 3 * bound(m), f"row {row}"


@pytest.mark.parametrize("m", [1, 8, 33, 64, 65, 150])
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_after_a_residual(form: str, m: int, ctx: CudaContext) -> None:
    """Up to 32 rows, the first GEMM leaves what the second's norm needs, as beside bf16 weights."""
    width, f, k = sized((2560, 1216, 4096), (640, 304, 1024))
    rng = np.random.default_rng(m)
    a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
    x = rounded(rng.standard_normal((m, width), np.float32) * 3, "bf16")
    norm = (1 + rng.standard_normal(width) / 4).astype(np.float32)
    weights = {"wo": weight(rng, width, k, form), "unit": raw(np.eye(width, dtype=np.float32), "bf16")}
    weights |= {name: weight(rng, f, width, form) for name in ("gate", "up")}
    b = Builder("handed")
    stream = b.output("x", "T", width, dtype="bf16")
    x0 = b.input("x0", "T", width, dtype="bf16")
    b.emit(LINEAR, out=stream, a=x0, w=b.weight("unit", width, width, dtype="bf16"))
    b.emit(
        LINEAR_RESIDUAL,
        x=stream,
        a=b.input("a", "T", k, dtype="bf16"),
        w=b.weight("wo", width, k, dtype=form),
    )
    b.emit(
        GATE_UP_SWIGLU, {"eps": 1e-6}, out=b.output("out", "T", f, dtype="bf16"), x=stream,
        norm=b.weight("norm", width, dtype="f32"), w_gate=b.weight("gate", f, width, dtype=form),
        w_up=b.weight("up", f, width, dtype=form),
    )  # fmt: skip
    weights["norm"] = raw(norm, "f32")
    program = b.build()
    got = run_once(ctx, program, weights, {}, {"x0": x, "a": a}, {"T": m})
    stream_values = x + a @ weights["wo"].values().T
    h = stream_values / np.sqrt(np.mean(stream_values**2, axis=1, keepdims=True) + 1e-6) * norm
    g = h @ weights["gate"].values().T
    assert relative(got["x"], stream_values) < bound(m)
    assert relative(got["out"], g / (1 + np.exp(-g)) * (h @ weights["up"].values().T)) < 3 * bound(m)


def test_choices_by_rows(ctx: CudaContext) -> None:
    few = choose_gemm(GemmProblem(32, 2560, 2560, "bf16", weights="fp8_rows"), ctx.target)
    many = choose_gemm(GemmProblem(33, 2560, 2560, "bf16", weights="fp8_groups"), ctx.target)
    assert isinstance(few, SkinnyChoice) and few.kernel.startswith("skinny_fp8_rows_32")
    assert isinstance(many, Fp8Choice) and many.kernel.startswith("fp8_groups_bf16")


def test_a_bf16_weight_is_quantised_on_the_device_as_on_the_host(ctx: CudaContext) -> None:
    """Equal codes and scales: what --quantization fp8 serves does not depend on the backend."""
    from pegainfer.ops.quantize_on_load import quantized_on_load

    n, k = 200, 384
    values = rounded(np.random.default_rng(3).standard_normal((n, k), np.float32), "bf16")
    values[7] = 0
    loaded = quantized_on_load({"w": raw(values, "bf16")}, "fp8")
    stored = {"w": quantized_weight("fp8_r128", values)}
    tensor = Builder("w").weight("w", n, k, dtype="fp8_r128")
    parts = []
    for weights in (loaded, stored):
        backend = CudaBackend(ctx, weights, EAGER)
        codes, scales = backend.store.fp8((tensor,), "rows")
        backend.load()
        parts.append((codes.numpy(ctx.stream), scales.numpy(ctx.stream)))
    np.testing.assert_array_equal(parts[0][1], parts[1][1])
    np.testing.assert_array_equal(parts[0][0], parts[1][0])
