"""The recurrent references against formulas written another way, and what they do with states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.ops.activation import SIGMOID_GATE
from pegainfer.ops.check import suitable_cases
from pegainfer.ops.compose import run_reference
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE
from pegainfer.ops.norm import GATED_RMS_NORM
from pegainfer.ops.recurrence import key_heads
from pegainfer.ops.spec import Arrays, Case, OpSpec

Array = np.ndarray[Any, Any]
WIDTHS = {"causal_conv_silu": ("x",), "gated_delta_rule": ("qkv", "a", "b")}
STATES = {"causal_conv_silu": "conv", "gated_delta_rule": "delta"}
BOTH = pytest.mark.parametrize("spec", [CAUSAL_CONV_SILU, GATED_DELTA_RULE], ids=lambda s: s.name)


def one_row(spec: OpSpec, case: Case, tokens: int, seed: int = 0) -> Arrays:
    """Inputs of one row of `tokens` from position 0 on, with the case's weights, and a pool of zeros."""
    rng, arrays = np.random.default_rng(seed), {k: v.astype(np.float64) for k, v in case.arrays.items()}
    for name in WIDTHS[spec.name]:
        arrays[name] = rng.standard_normal((tokens, arrays[name].shape[1]))
    state = STATES[spec.name]
    arrays[state] = np.zeros((4, *arrays[state].shape[1:]))
    return arrays


def run(spec: OpSpec, case: Case, arrays: Arrays, ids: Any, rows: Any, saves: dict[int, int]) -> Array:
    """The output; rows as (first token, tokens, context). Writes the pool."""
    tokens = len(arrays[WIDTHS[spec.name][0]])
    last = [case.sizes["H"], case.sizes["V"]] if spec is GATED_DELTA_RULE else [case.sizes["F"]]
    starts, lens, contexts = np.array(rows).T
    where = np.full(tokens, -1)
    for t, entry in saves.items():
        where[t] = entry
    call = arrays | {
        "out": np.full((tokens, *last), np.nan), "state_ids": np.array(ids), "state_saves": where,
        "query_starts": starts, "query_lens": lens, "context_lens": contexts,
    }  # fmt: skip
    run_reference(spec, case.sizes, call, case.attrs)
    return call["out"]


def ordinary(spec: OpSpec, part: str) -> Case:
    return next(c for c in suitable_cases(spec, 7) if part in c.label)


def test_convolution_is_numpys() -> None:
    case = ordinary(CAUSAL_CONV_SILU, "64 channels")
    arrays = one_row(CAUSAL_CONV_SILU, case, 30)
    out = run(CAUSAL_CONV_SILU, case, arrays, [1], [(0, 30, 30)], {})
    for f in range(64):
        y = np.convolve(arrays["x"][:, f], arrays["taps"][::-1, f])[:30]
        np.testing.assert_allclose(out[:, f], y / (1 + np.exp(-y)), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(arrays["conv"][1, case.attrs["layer"]], arrays["x"][-3:])


def chunked(q: Array, k: Array, v: Array, g: Array, beta: Array, size: int) -> tuple[Array, Array]:
    """One head in the chunked form (arXiv:2412.06464, section 3.3): [T, V] and the last state [K, V]."""
    s, out = np.zeros((q.shape[1], v.shape[1])), np.empty_like(v)
    for at in range(0, len(q), size):
        part = slice(at, at + size)
        qc, kc, vc, bc, total = q[part], k[part], v[part], beta[part], np.cumsum(g[part])
        n = len(qc)
        decay = np.exp(np.minimum(total[:, None] - total, 0)) * np.tril(np.ones((n, n)))
        a = np.tril(bc[:, None] * (kc @ kc.T) * decay, -1)
        written = np.linalg.solve(np.eye(n) + a, bc[:, None] * (vc - np.exp(total)[:, None] * (kc @ s)))
        out[part] = np.exp(total)[:, None] * (qc @ s) + (qc @ kc.T * decay) @ written
        s = np.exp(total[-1]) * s + (kc * np.exp(total[-1] - total)[:, None]).T @ written
    return out, s


@pytest.mark.parametrize("part", ["1x2 heads of 128x128", "3x1 heads of 20x48", "1x3 heads of 64x80"])
def test_delta_rule_is_its_chunked_form(part: str) -> None:
    case, tokens = ordinary(GATED_DELTA_RULE, part), 50
    arrays, s = one_row(GATED_DELTA_RULE, case, tokens), case.sizes
    out = run(GATED_DELTA_RULE, case, arrays, [2], [(0, tokens, tokens)], {})
    keys = key_heads(s["F"], s["H"], s["K"], s["V"])
    g = -np.exp(arrays["a_log"]) * np.log1p(np.exp(arrays["a"] + arrays["dt_bias"]))
    beta = 1 / (1 + np.exp(-arrays["b"]))
    for h in range(s["H"]):
        at = h * keys // s["H"] * s["K"]
        q, k = (arrays["qkv"][:, at + start : at + start + s["K"]] for start in (0, keys * s["K"]))
        q, k = (x / np.sqrt((x**2).sum(axis=1, keepdims=True) + 1e-6) for x in (q, k))
        v = arrays["qkv"][:, 2 * keys * s["K"] + h * s["V"] :][:, : s["V"]]
        want, state = chunked(q / np.sqrt(s["K"]), k, v, g[:, h], beta[:, h], 16)
        np.testing.assert_allclose(out[:, h], want, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(arrays["delta"][2, case.attrs["layer"], h], state, rtol=1e-7, atol=1e-9)


def test_a_key_that_is_stored_twice_is_overwritten() -> None:
    """With β near 1 and no decay the state returns the newest value of a key, not the sum of both."""
    heads, one = np.zeros((1, 1, 1, 2, 1)), np.array([[50.0], [50.0]])
    qkv = np.array([[1.0, 0, 1, 0, 3], [1, 0, 1, 0, 5]])  # q = k = (1, 0); v = 3, then 5
    arrays = {
        "out": np.empty((2, 1, 1)), "delta": heads, "qkv": qkv, "a": -one, "b": one, "a_log": np.zeros(1),
        "dt_bias": np.zeros(1), "state_ids": np.array([0]), "state_saves": np.array([-1, -1]),
        "query_starts": np.array([0]), "query_lens": np.array([2]), "context_lens": np.array([2]),
    }  # fmt: skip
    run_reference(GATED_DELTA_RULE, {}, arrays, {"layer": 0, "eps": 0.0})
    np.testing.assert_allclose(arrays["out"].ravel(), np.array([3, 5]) / np.sqrt(2))
    np.testing.assert_allclose(heads.ravel(), [5, 0], atol=1e-12)


@BOTH
def test_chunks_and_saved_states_continue_a_row(spec: OpSpec) -> None:
    case = ordinary(spec, "a prompt")
    whole, parts = one_row(spec, case, 12), one_row(spec, case, 12)
    want = run(spec, case, whole, [0], [(0, 12, 12)], {6: 3})
    got, names = [], WIDTHS[spec.name]
    for first, count in ((0, 2), (2, 5), (7, 5)):
        step = parts | {n: parts[n][first : first + count] for n in names}
        got.append(run(spec, case, step, [0], [(0, count, first + count)], {}))
    state = STATES[spec.name]
    np.testing.assert_allclose(np.concatenate(got), want, rtol=1e-12)
    np.testing.assert_allclose(parts[state][0], whole[state][0], rtol=1e-12)
    again = whole | {n: whole[n][7:] for n in names}
    np.testing.assert_allclose(run(spec, case, again, [3], [(0, 5, 12)], {}), want[7:], rtol=1e-12)
    np.testing.assert_allclose(whole[state][3], whole[state][0], rtol=1e-12)


@BOTH
def test_rows_at_position_0_ignore_their_entry_and_padding_touches_nothing(spec: OpSpec) -> None:
    case, state = ordinary(spec, "a prompt"), STATES[spec.name]
    arrays = one_row(spec, case, 5)
    arrays[state][...] = np.nan
    out = run(spec, case, arrays, [-1, 1], [(0, 2, 2), (2, 3, 3)], {})
    assert not out[:2].any() and np.isfinite(out[2:]).all()
    layer = case.attrs["layer"]
    assert np.isfinite(arrays[state][1, layer]).all()
    arrays[state][1, layer] = np.nan
    assert np.isnan(arrays[state]).all()


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [
        ((96, 4, 8, 16), 2),
        ((8192, 32, 128, 128), 16),
        ((97, 4, 8, 16), 0),
        ((112, 4, 8, 16), 0),
        ((64, 4, 8, 16), 0),
    ],
)
def test_key_heads_follow_from_the_width(sizes: tuple[int, int, int, int], keys: int) -> None:
    """The last ones: no whole number, 3 for 4 value heads, none."""
    assert key_heads(*sizes) == keys


def test_gates_by_formula() -> None:
    rng = np.random.default_rng(0)
    x, gate, weight = rng.standard_normal((3, 2, 8)), rng.standard_normal((3, 2, 8)), rng.standard_normal(8)
    out, own = np.empty_like(x), x.reshape(3, 16).copy()
    run_reference(GATED_RMS_NORM, {}, {"out": out, "x": x, "gate": gate, "weight": weight}, {"eps": 1e-6})
    normed = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(out, normed * gate / (1 + np.exp(-gate)))
    run_reference(SIGMOID_GATE, {}, {"x": own, "gate": gate.reshape(3, 16)}, {})
    np.testing.assert_allclose(own, (x / (1 + np.exp(-gate))).reshape(3, 16))
