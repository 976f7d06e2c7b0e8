"""The references against formulas written another way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pegainfer.ops.activation import SILU_MUL
from pegainfer.ops.attention import ATTENTION, KV_APPEND
from pegainfer.ops.check import suitable_cases
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD
from pegainfer.ops.compose import run_reference
from pegainfer.ops.embed import EMBEDDING, GATHER_ROWS
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.norm import HEAD_NORM, RMS_NORM
from pegainfer.ops.spec import Case


def dense_attention(case: Case) -> np.ndarray:
    """Masked softmax over a contiguous copy, row by row, all heads at once: [T, H, D]."""
    a, s = case.arrays, case.sizes
    out = np.full(a["q"].shape, np.nan)
    for row in range(s["R"]):
        context, count = int(a["context_lens"][row]), int(a["query_lens"][row])
        places = [(a["block_table"][row, t // s["S"]], t % s["S"]) for t in range(context)]
        pages = np.stack([a["kv"][b, case.attrs["layer"], :, :, o] for b, o in places], axis=2)
        keys, values = np.repeat(pages.astype(np.float64), s["H"] // s["G"], axis=1)
        mine = slice(a["query_starts"][row], a["query_starts"][row] + count)
        q = a["q"][mine].astype(np.float64).swapaxes(0, 1)
        scores = q @ keys.swapaxes(1, 2) * case.attrs["scale"]
        future = np.arange(context)[None, :] > np.arange(context - count, context)[:, None]
        scores[:, future] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[mine] = (p / p.sum(axis=-1, keepdims=True) @ values).swapaxes(0, 1)
    return out


@pytest.mark.parametrize("case", suitable_cases(ATTENTION, 5), ids=lambda c: c.label)
def test_attention_is_dense_masked_softmax(case: Case) -> None:
    out = np.full(case.arrays["q"].shape, np.nan)
    run_reference(ATTENTION, case.sizes, {**case.arrays, "out": out}, case.attrs)
    want = dense_attention(case)
    np.testing.assert_allclose(out, want, rtol=1e-9, atol=1e-12 * np.nanmax(np.abs(want)))


def test_attention_by_hand() -> None:
    """Two keys with scores ln 3 and 0: weights 3/4 and 1/4. The first token sees itself alone."""
    kv = np.full((3, 1, 2, 1, 1, 1), np.nan)
    kv[2, 0, :, 0, 0, 0], kv[0, 0, :, 0, 0, 0] = (math.log(3), 10), (0, 20)
    arrays = {
        "out": np.empty((2, 1, 1)), "q": np.ones((2, 1, 1)), "kv": kv,
        "query_starts": np.array([0]), "query_lens": np.array([2]), "context_lens": np.array([2]),
        "block_table": np.array([[2, 0, 1]]),
    }  # fmt: skip
    run_reference(ATTENTION, {}, arrays, {"layer": 0, "scale": 1.0})
    np.testing.assert_allclose(arrays["out"][:, 0, 0], [10, 12.5])


def test_kv_append_writes_its_slots_and_nothing_else() -> None:
    kv = np.full((3, 2, 2, 1, 4, 2), -1.0)
    k, v = np.arange(4.0).reshape(2, 1, 2), 10 + np.arange(4.0).reshape(2, 1, 2)
    run_reference(KV_APPEND, {}, {"kv": kv, "k": k, "v": v, "slots": np.array([9, 3])}, {"layer": 1})
    assert kv[2, 1, :, 0, 1].tolist() == [[0, 1], [10, 11]]
    assert kv[0, 1, :, 0, 3].tolist() == [[2, 3], [12, 13]]
    assert (kv != -1).sum() == 8


def test_rms_norm_gives_rows_of_unit_mean_square() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((4, 100)) * [[1], [1e3], [1e-3], [0]], rng.standard_normal(100)
    out = np.empty_like(x)
    run_reference(RMS_NORM, {}, {"out": out, "x": x, "weight": weight}, {"eps": 1e-12})
    np.testing.assert_allclose(((out / weight) ** 2).mean(axis=1), [1, 1, 1, 0], rtol=1e-5)
    np.testing.assert_allclose(out[1], math.sqrt(100) * x[1] / np.linalg.norm(x[1]) * weight)


def test_head_norm_is_rms_norm_of_every_head() -> None:
    x, weight = np.random.default_rng(0).standard_normal((3, 4, 8)), np.linspace(-1, 2, 8)
    flat, got = np.empty((12, 8)), x.copy()
    run_reference(RMS_NORM, {}, {"out": flat, "x": x.reshape(12, 8), "weight": weight}, {"eps": 1e-6})
    run_reference(HEAD_NORM, {}, {"x": got, "weight": weight}, {"eps": 1e-6})
    np.testing.assert_array_equal(got.reshape(12, 8), flat)


def test_silu_mul() -> None:
    gate, up = np.array([[0.0, 1.0, -1.0, 1000.0, -1000.0]]), np.array([[5.0, 2.0, 2.0, 1.0, 1.0]])
    out = np.empty_like(gate)
    run_reference(SILU_MUL, {}, {"out": out, "gate": gate, "up": up}, {})
    half = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(out, [[0, 2 * half, -2 * (1 - half), 1000, 0]], atol=1e-300)


def test_linear_by_loops() -> None:
    rng = np.random.default_rng(0)
    a, w, x = rng.standard_normal((3, 5)), rng.standard_normal((4, 5)), rng.standard_normal((3, 4))
    want = [[math.fsum(a[t] * w[n]) for n in range(4)] for t in range(3)]
    out, onto = np.empty((3, 4)), x.copy()
    run_reference(LINEAR, {}, {"out": out, "a": a, "w": w}, {})
    run_reference(LINEAR_RESIDUAL, {}, {"x": onto, "a": a, "w": w}, {})
    np.testing.assert_allclose(out, want, rtol=1e-13)
    np.testing.assert_allclose(onto, x + want, rtol=1e-13)


def test_rows_of_tables() -> None:
    table, ids = np.arange(12.0).reshape(4, 3), np.array([3, 0, 3], np.int32)
    out = np.empty((3, 3))
    run_reference(EMBEDDING, {}, {"out": out, "table": table, "ids": ids}, {})
    assert out.tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    run_reference(GATHER_ROWS, {}, {"out": out, "x": table[::-1], "rows": ids}, {})
    assert out.tolist() == [[0, 1, 2], [9, 10, 11], [0, 1, 2]]


def test_gate_up_and_lm_head_by_formula() -> None:
    rng = np.random.default_rng(3)
    x, norm = rng.standard_normal((4, 16), np.float32), rng.standard_normal(16, np.float32)
    w_gate, w_up, w = rng.standard_normal((3, 8, 16), np.float32)
    h = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * norm
    gate, up = h @ w_gate.T, h @ w_up.T
    out, logits = np.empty((4, 8), np.float32), np.empty((2, 8), np.float32)
    arrays = {"out": out, "x": x, "norm": norm, "w_gate": w_gate, "w_up": w_up}
    run_reference(GATE_UP_SWIGLU, {"T": 4, "M": 16, "F": 8}, arrays, {"eps": 1e-5})
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-6)
    rows = np.array([3, 1], np.int32)
    arrays = {"logits": logits, "x": x, "rows": rows, "norm": norm, "w": w}
    run_reference(LM_HEAD, {"T": 4, "M": 16, "L": 2, "V": 8}, arrays, {"eps": 1e-5})
    np.testing.assert_allclose(logits, (h @ w.T)[rows], rtol=1e-4, atol=1e-6)
