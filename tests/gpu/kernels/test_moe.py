"""Experts on the GPU: a token's result does not depend on the others, whichever kernel takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.moe import ROW_SLOTS, TILE_SLOTS
from pegainfer.ops.compose import one_call, run_reference
from pegainfer.ops.moe import EXPERT_DOWN, EXPERT_GATE_UP, ROUTE_EXPERTS
from pegainfer.ops.rounding import rounded
from tests.gpu.harness import raw, run_once, sized

Array = np.ndarray[Any, Any]
N, K, M, F = 16, 4, sized(2048, 128), sized(768, 64)


def stacks(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {"w_gate": (N, F, M), "w_up": (N, F, M), "w_down": (N, M, F)}
    return {
        name: rounded(rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5), "bf16")
        for name, shape in shapes.items()
    }


def gate_up(ctx: CudaContext, w: dict[str, Array], h: Array, experts: Array) -> Array:
    sizes = {"T": len(h), "N": N, "K": K, "M": M, "F": F}
    dtypes = {"act": "bf16", "h": "bf16", "experts": "i32", "w_gate": "bf16", "w_up": "bf16"}
    program = one_call(EXPERT_GATE_UP, sizes, dtypes, {})
    weights = {name: raw(w[name], "bf16") for name in ("w_gate", "w_up")}
    return run_once(ctx, program, weights, {}, {"h": h, "experts": experts}, sizes)["act"]


def down(ctx: CudaContext, w: dict[str, Array], act: Array, experts: Array, gates: Array) -> Array:
    sizes = {"T": len(act), "N": N, "K": K, "M": M, "F": F}
    dtypes = {"out": "f32", "act": "bf16", "experts": "i32", "gates": "f32", "w_down": "bf16"}
    program = one_call(EXPERT_DOWN, sizes, dtypes, {})
    inputs = {"act": act, "experts": experts, "gates": gates}
    return run_once(ctx, program, {"w_down": raw(w["w_down"], "bf16")}, {}, inputs, sizes)["out"]


def choices(rng: np.random.Generator, tokens: int, how: str) -> Array:
    """[T, K] distinct experts in ascending order."""
    if how == "one expert":
        return np.tile(np.arange(3, 3 + K, dtype=np.int32), (tokens, 1))
    picked = np.sort(np.argsort(rng.random((tokens, N)), axis=1)[:, :K], axis=1).astype(np.int32)
    return (
        np.where(rng.random(picked.shape) < 0.3, -1, picked).astype(np.int32) if how == "absent" else picked
    )


@pytest.mark.parametrize("how", ["spread", "one expert", "absent"])
@pytest.mark.parametrize("tokens", [1, ROW_SLOTS // K, ROW_SLOTS // K + 1, 2 * TILE_SLOTS + 1, 700])
def test_products_match_the_reference(tokens: int, how: str, ctx: CudaContext) -> None:
    rng, w = np.random.default_rng(tokens), stacks(1)
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, gates = choices(rng, tokens, how), rng.random((tokens, K), np.float32)
    sizes = {"T": tokens, "N": N, "K": K, "M": M, "F": F}
    want = {"act": np.empty((tokens, K, F), np.float32), "out": np.empty((tokens, M), np.float32)}
    up = {"act": want["act"], "h": h, "experts": experts, "w_gate": w["w_gate"], "w_up": w["w_up"]}
    run_reference(EXPERT_GATE_UP, sizes, up, {})
    act = gate_up(ctx, w, h, experts)
    np.testing.assert_allclose(act, want["act"], rtol=0.03, atol=0.02)
    assert (act[experts < 0] == 0).all()
    after = {"out": want["out"], "act": act, "experts": experts, "gates": gates, "w_down": w["w_down"]}
    run_reference(EXPERT_DOWN, sizes, after, {})
    np.testing.assert_allclose(down(ctx, w, act, experts, gates), want["out"], rtol=0.02, atol=0.02)


def test_a_token_gives_the_same_bits_in_any_company_of_tiles(ctx: CudaContext) -> None:
    rng, w = np.random.default_rng(2), stacks(2)
    tokens = 300
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, order = choices(rng, tokens, "spread"), rng.permutation(tokens)
    whole, moved = gate_up(ctx, w, h, experts), gate_up(ctx, w, h[order], experts[order])
    assert moved.tobytes() == whole[order].tobytes()
    part = slice(100, 150)
    assert gate_up(ctx, w, h[part], experts[part]).tobytes() == whole[part].tobytes()


@pytest.mark.parametrize("tokens", [4, 200])
def test_nan_in_one_row_harms_no_other(tokens: int, ctx: CudaContext) -> None:
    rng, w = np.random.default_rng(3), stacks(3)
    h = rounded(rng.standard_normal((tokens, M), np.float32), "bf16")
    experts, gates = choices(rng, tokens, "spread"), rng.random((tokens, K), np.float32)
    bad = h.copy()
    bad[2] = np.nan
    others = np.arange(tokens) != 2
    want, got = gate_up(ctx, w, h, experts), gate_up(ctx, w, bad, experts)
    assert np.isnan(got[2]).all() and got[others].tobytes() == want[others].tobytes()
    sums, spoilt = (down(ctx, w, act, experts, gates) for act in (want, got))
    assert np.isnan(spoilt[2]).all() and spoilt[others].tobytes() == sums[others].tobytes()


@pytest.mark.parametrize(("n", "k"), [(128, 8), (256, 8), (512, 10), (60, 4)])
def test_routers_of_published_models(n: int, k: int, ctx: CudaContext) -> None:
    rng = np.random.default_rng(n)
    sizes = {"T": 333, "N": n, "K": k}
    logits = (rng.standard_normal((333, n)) * 3).astype(np.float32)
    logits[5], logits[6, 3], logits[7] = 0, np.nan, np.nan
    attrs = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
    want = {"experts": np.empty((333, k), np.int32), "gates": np.empty((333, k), np.float32)}
    run_reference(ROUTE_EXPERTS, sizes, {**want, "logits": logits}, attrs)
    dtypes = {"experts": "i32", "gates": "f32", "logits": "f32"}
    got = run_once(ctx, one_call(ROUTE_EXPERTS, sizes, dtypes, attrs), {}, {}, {"logits": logits}, sizes)
    np.testing.assert_array_equal(got["experts"], want["experts"])
    np.testing.assert_allclose(got["gates"], want["gates"], rtol=1e-5)
