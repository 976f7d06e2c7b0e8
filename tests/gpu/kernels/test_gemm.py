"""Matrix products at true sizes, by every route, against float32 on the host."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.gemm import GemmProblem, StreamChoice, choose_gemm, choose_stream
from pegainfer.lower.cuda.skinny import Shares, SkinnyChoice
from pegainfer.lower.cuda.target import Tuned, Tuning
from pegainfer.lower.cuda.wide import Cut
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD
from pegainfer.ops.compose import one_call, staged_inputs
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.program import Builder
from pegainfer.ops.spec import OpSpec
from tests.gpu.harness import EAGER, raw, rounded, run_once, sized

Array = np.ndarray[Any, Any]
M = sized((1, 3, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256), (1, 9, 17, 33, 64, 65, 130))
# (N, K): Qwen3-4B's o, down and qkv, SmolLM2's, and sizes that no tile, or no stage, divides
SHAPES = sized(
    ((2560, 4096), (2560, 9728), (6144, 2560), (576, 1536), (1000, 648), (1001, 648), (8, 4096), (24, 8),
     (7, 72)),
    ((320, 2048), (576, 768), (201, 648), (24, 8)),
)  # fmt: skip
WIDTHS = sized((9728, 2560), (608, 640))  # of gate and up, and of their input


def relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", [LINEAR, LINEAR_RESIDUAL], ids=lambda s: s.name)
def test_products(spec: OpSpec, shape: tuple[int, int], dtype: str, ctx: CudaContext) -> None:
    n, k = shape
    rng = np.random.default_rng(n + k)
    w = rounded(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), dtype)
    weights = {"w": raw(w, dtype)}
    for m in M:
        a = rounded(rng.standard_normal((m, k), np.float32), dtype)
        x = rounded(rng.standard_normal((m, n), np.float32), dtype)
        out = "out" if spec is LINEAR else "x"
        program = one_call(spec, {"T": m, "N": n, "K": k}, {out: dtype, "a": dtype, "w": dtype}, {})
        inputs = {"a": a, "x.staged": x, "staged_rows": np.arange(m, dtype=np.int32)}
        inputs = inputs if spec is LINEAR_RESIDUAL else {"a": a}
        got = run_once(ctx, program, weights, {}, inputs, {"T": m, "N": n, "K": k})[out]
        want = a @ w.T + (x if spec is LINEAR_RESIDUAL else 0)
        assert relative(got, want) < (3e-3 if dtype == "bf16" else 4e-4), f"m = {m}"


@pytest.mark.parametrize("m", [1, 7, 16, 40, 64, 65, 128, 201])
def test_norm_and_gated_activation_fused(m: int, ctx: CudaContext) -> None:
    f, k = WIDTHS
    rng = np.random.default_rng(m)
    x = rounded(rng.standard_normal((m, k), np.float32) * 3, "bf16")
    norm = (1 + rng.standard_normal(k) / 4).astype(np.float32)
    gate, up = (rounded(rng.standard_normal((f, k), np.float32) * np.float32(k**-0.5), "bf16") for _ in "gu")
    sizes = {"T": m, "F": f, "M": k}
    dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(GATE_UP_SWIGLU, sizes, dtypes, {"eps": 1e-6})
    weights = {"w_gate": raw(gate, "bf16"), "w_up": raw(up, "bf16")}
    got = run_once(ctx, program, weights, {}, {"x": x, "norm": norm}, sizes)["out"]
    h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * norm
    g = h @ gate.T
    assert relative(got, g / (1 + np.exp(-g)) * (h @ up.T)) < 6e-3


@pytest.mark.parametrize("m", [1, 8, 13, 33, 64, 70, 128, 190])
def test_logits_of_chosen_rows(m: int, ctx: CudaContext) -> None:
    v, tokens = (sized(30_011, 3_011), 50) if m < 33 else (sized(50_008, 5_008), m + 26)
    k = sized(1024, 256)
    rng = np.random.default_rng(m)
    x = rounded(rng.standard_normal((tokens, k), np.float32), "bf16")
    w = rounded(rng.standard_normal((v, k), np.float32) * np.float32(k**-0.5), "bf16")
    rows = rng.permutation(tokens)[:m].astype(np.int32)
    sizes = {"T": tokens, "L": m, "M": k, "V": v}
    dtypes = {"logits": "f32", "x": "bf16", "rows": "i32", "norm": "f32", "w": "bf16"}
    program = one_call(LM_HEAD, sizes, dtypes, {"eps": 1e-6})
    inputs = {"x": x, "rows": rows, "norm": np.ones(k, np.float32)}
    got = run_once(ctx, program, {"w": raw(w, "bf16")}, {}, inputs, sizes)["logits"]
    h = x[rows] / np.sqrt(np.mean(x[rows] ** 2, axis=1, keepdims=True) + 1e-6)
    assert relative(got, h @ w.T) < 4e-3


@pytest.mark.parametrize("m", [1, 8, 13, 32, 64, 65, 128, 150, 256, 257])
def test_a_norm_after_a_residual_is_handed_over(m: int, ctx: CudaContext) -> None:
    """Where both products are Hopper's, the first leaves what the second's norm needs; no launch between."""
    width, f, k = sized((2560, 1216, 4096), (640, 304, 1024))
    rng = np.random.default_rng(m)
    a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
    x = rounded(rng.standard_normal((m, width), np.float32) * 3, "bf16")
    wo = rounded(rng.standard_normal((width, k), np.float32) * np.float32(k**-0.5), "bf16")
    gate, up = (
        rounded(rng.standard_normal((f, width), np.float32) * np.float32(width**-0.5), "bf16") for _ in "gu"
    )
    norm = (1 + rng.standard_normal(width) / 4).astype(np.float32)
    b = Builder("handed")
    stream = b.output("x", "T", width, dtype="bf16")
    wx = b.weight("unit", width, width, dtype="bf16")
    b.emit(LINEAR, out=stream, a=b.input("x0", "T", width, dtype="bf16"), w=wx)
    b.emit(
        LINEAR_RESIDUAL,
        x=stream,
        a=b.input("a", "T", k, dtype="bf16"),
        w=b.weight("wo", width, k, dtype="bf16"),
    )
    b.emit(
        GATE_UP_SWIGLU, {"eps": 1e-6}, out=b.output("out", "T", f, dtype="bf16"), x=stream,
        norm=b.weight("norm", width, dtype="f32"), w_gate=b.weight("gate", f, width, dtype="bf16"),
        w_up=b.weight("up", f, width, dtype="bf16"),
    )  # fmt: skip
    weights = {
        "unit": raw(np.eye(width, dtype=np.float32), "bf16"), "wo": raw(wo, "bf16"), "norm": raw(norm, "f32"),
        "gate": raw(gate, "bf16"), "up": raw(up, "bf16"),
    }  # fmt: skip
    got = run_once(ctx, b.build(), weights, {}, {"x0": x, "a": a}, {"T": m})
    want = rounded(x + a @ wo.T, "bf16")
    assert relative(got["x"], want) < 2e-3
    h = got["x"] / np.sqrt(np.mean(got["x"] ** 2, axis=1, keepdims=True) + 1e-6) * norm
    g = h @ gate.T
    assert relative(got["out"], g / (1 + np.exp(-g)) * (h @ up.T)) < 6e-3


@pytest.mark.parametrize("shape", sized([(6144, 2560), (2560, 4096), (2560, 9728)], [(640, 2048)]), ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(shape: tuple[int, int], ctx: CudaContext) -> None:
    """On Hopper, where the launches of a shape share k out alike: bit by bit, whatever the batch."""
    n, k = shape
    rng = np.random.default_rng(n)
    w = rounded(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), "bf16")
    a = rounded(rng.standard_normal((256, k), np.float32), "bf16")
    outputs: dict[object, list[Array]] = {}
    for m in (1, 7, 16, 32, 64, 65, 128, 129, 256):
        choice = choose_gemm(GemmProblem(m, n, k, "bf16"), ctx.target)
        if not isinstance(choice, SkinnyChoice):
            if m > 64:
                continue
            pytest.skip("other kernels than Hopper's add up by batch size")
        program = one_call(LINEAR, {"T": m, "N": n, "K": k}, {"out": "bf16", "a": "bf16", "w": "bf16"}, {})
        sizes = {"T": m, "N": n, "K": k}
        got = run_once(ctx, program, {"w": raw(w, "bf16")}, {}, {"a": a[:m]}, sizes)["out"]
        # Which side of wgmma the rows are, and how k is added up.
        cut = (m > 64, choice.splits, choice.wide if choice.splits > 1 else 0)
        outputs.setdefault(cut, []).append(got)
    for same in outputs.values():
        for got in same[:-1]:
            assert np.array_equal(got, same[-1][: len(got)])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(
    "cut", [Cut(152), Cut(136, 4, 2), Cut(88, 4), Cut(96, 2), Cut(48, 5), Cut(8)], ids=str
)
def test_wide_products_however_they_are_cut(
    cut: Cut, dtype: str, ctx: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel, with whole and partial tiles, whatever the chooser would take for such a shape."""
    if ctx.device.info.arch != "90a":
        pytest.skip("kernels of Hopper's alone")
    n, k = 2 * cut.rows + 24, 776
    tuned = Tuned(ctx.target.info.name, "90a", "wide", {"n": n, "k": k}, 256, asdict(cut))
    rows = (*ctx.target.tuning.rows, tuned)
    monkeypatch.setattr(ctx, "target", replace(ctx.target, tuning=Tuning(rows)))
    rng = np.random.default_rng(cut.rows)
    w = rounded(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), dtype)
    for m in (65, 128, 129, 192, 250):
        choice = choose_gemm(GemmProblem(m, n, k, dtype), ctx.target)
        assert isinstance(choice, SkinnyChoice) and choice.rows == cut.rows
        a = rounded(rng.standard_normal((m, k), np.float32), dtype)
        a[m // 2] = 0
        sizes = {"T": m, "N": n, "K": k}
        program = one_call(LINEAR, sizes, {"out": dtype, "a": dtype, "w": dtype}, {})
        got = run_once(ctx, program, {"w": raw(w, dtype)}, {}, {"a": a}, sizes)["out"]
        assert relative(got, a @ w.T) < (3e-3 if dtype == "bf16" else 4e-4), f"m = {m}"
        assert not got[m // 2].any()


@pytest.mark.parametrize(
    "shares",
    [Shares(168, 5, 1, 4), Shares(96, 5, 2, 4), Shares(72, 4, 2, 4), Shares(88, 4), Shares(128, 1, 2, 6)],
    ids=str,
)
@pytest.mark.parametrize("residual", [False, True])
def test_few_rows_however_the_weight_is_shared_out(
    shares: Shares, residual: bool, ctx: CudaContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and partial tiles and stages, whatever the chooser would take for such a shape."""
    if ctx.device.info.arch != "90a":
        pytest.skip("kernels of Hopper's alone")
    n, k = 2 * shares.rows + 24, 1416
    tuned = Tuned(ctx.target.info.name, "90a", "skinny", {"n": n, "k": k}, 64, asdict(shares))
    rows = (*ctx.target.tuning.rows, tuned)
    monkeypatch.setattr(ctx, "target", replace(ctx.target, tuning=Tuning(rows)))
    rng = np.random.default_rng(shares.rows)
    w = rounded(rng.standard_normal((n, k), np.float32) * np.float32(k**-0.5), "bf16")
    for m in (1, 7, 8, 16):
        kind = "residual" if residual else "store"
        choice = choose_gemm(GemmProblem(m, n, k, "bf16", kind), ctx.target)
        assert isinstance(choice, SkinnyChoice) and (choice.rows, choice.splits) == (
            shares.rows,
            shares.splits,
        )
        a = rounded(rng.standard_normal((m, k), np.float32), "bf16")
        x = rounded(rng.standard_normal((m, n), np.float32), "bf16")
        sizes = {"T": m, "N": n, "K": k}
        if residual:
            program = one_call(LINEAR_RESIDUAL, sizes, {"x": "bf16", "a": "bf16", "w": "bf16"}, {})
            given = staged_inputs(LINEAR_RESIDUAL, {"x": x, "a": a})
            got, want = run_once(ctx, program, {"w": raw(w, "bf16")}, {}, given, sizes)["x"], x + a @ w.T
        else:
            program = one_call(LINEAR, sizes, {"out": "bf16", "a": "bf16", "w": "bf16"}, {})
            got, want = run_once(ctx, program, {"w": raw(w, "bf16")}, {}, {"a": a}, sizes)["out"], a @ w.T
        assert relative(got, want) < 4e-3, f"m = {m}"


def test_the_choice_follows_the_device(ctx: CudaContext) -> None:
    info = ctx.device.info
    few = choose_stream(GemmProblem(4, 6144, 2560, "bf16", "store", norm=True), info)
    assert isinstance(few, StreamChoice) and few.shared <= info.max_shared
    assert ctx.library.variant(few.kernel) is not None
    assert str(choose_gemm(GemmProblem(257, 6144, 2560, "bf16"), ctx.target)).startswith("cublasLt (257 rows")


def test_weights_of_any_format_arrive(ctx: CudaContext) -> None:
    """What the store packs is what was given: rows below each other, in pairs, reordered, converted."""
    rng = np.random.default_rng(0)
    f, k = 40, 64
    gate, up = (rounded(rng.standard_normal((f, k), np.float32), "f16") for _ in "gu")
    order = rng.permutation(f)
    shuffled = raw(up, "f16").take(0, [range(i, i + 1) for i in order.tolist()])
    sizes = {"T": 1, "F": f, "M": k}
    dtypes = {"out": "bf16", "x": "bf16", "norm": "f32", "w_gate": "f32", "w_up": "f16"}
    program = one_call(GATE_UP_SWIGLU, sizes, dtypes, {"eps": 1e-6})
    backend = CudaBackend(ctx, {"w_gate": raw(gate, "f32"), "w_up": shuffled}, EAGER)
    backend.prepare(program, {}, {"T": 1})
    backend.load()
    (packed,) = (t for t in backend.store._held.values() if len(t.shape) == 2)
    held = packed.numpy(ctx.stream)
    assert np.array_equal(held[0::2], rounded(gate, "bf16"))
    assert np.array_equal(held[1::2], rounded(up[order], "bf16"))
