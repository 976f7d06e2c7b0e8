"""Rotation against transformers' own values, complex numbers and what rotations must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.compose import run_reference
from pegainfer.ops.rope import ROPE, attention_factor, cos_sin_table, inverse_frequencies

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "ops" / "rope.json").read_text())
CASES = [
    pytest.param(c, id=f"{c['head_dim']}-{(c['scaling'] or {}).get('rope_type')}") for c in GOLDEN["cases"]
]


def floats(text: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), "<f4")


def rotate(x: np.ndarray, positions: list[int], table: np.ndarray) -> np.ndarray:
    out = x.copy()
    arrays = {"x": out, "positions": np.array(positions, np.int32), "cos_sin": table}
    run_reference(ROPE, {}, arrays, {})
    return out


@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: dict[str, Any]) -> None:
    got = inverse_frequencies(case["head_dim"], case["theta"], case["scaling"])
    np.testing.assert_allclose(got, floats(case["inv_freq"]), rtol=1e-6)
    assert attention_factor(case["scaling"]) == pytest.approx(case["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_rotation_equals_transformers(case: dict[str, Any]) -> None:
    """Angles are products in float32 there too: an ulp of a frequency at position 8191 is 5e-4 radians."""
    positions, d = GOLDEN["positions"], case["head_dim"]
    table = cos_sin_table(max(positions) + 1, floats(case["inv_freq"]), attention_factor(case["scaling"]))
    q = floats(case["q"]).reshape(len(positions), 2, d)
    got = rotate(q, positions, table)
    np.testing.assert_allclose(got, floats(case["rotated"]).reshape(q.shape), atol=2e-6)


def test_is_a_product_of_complex_numbers() -> None:
    rng = np.random.default_rng(1)
    x, positions, d = rng.standard_normal((5, 3, 80)), [0, 4, 4, 1000, 99], 80
    freqs = inverse_frequencies(d, 1e4, None)
    z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * np.exp(1j * np.outer(positions, freqs))[:, None]
    got = rotate(x, positions, cos_sin_table(1001, freqs))
    np.testing.assert_allclose(got, np.concatenate([z.real, z.imag], axis=-1), atol=1e-4)


def test_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.standard_normal((2, 1, 1, 64))
    table = cos_sin_table(300, inverse_frequencies(64, 1e4, None))
    scores = [
        float((rotate(q, [i], table) * rotate(k, [j], table)).sum())
        for i, j in ((7, 2), (105, 100), (299, 294))
    ]
    np.testing.assert_allclose(scores, scores[0], atol=1e-4)


def test_llama3_leaves_fast_pairs_and_slows_slow_ones() -> None:
    scaling = next(c["scaling"] for c in GOLDEN["cases"] if (c["scaling"] or {}).get("rope_type") == "llama3")
    ratio = inverse_frequencies(128, 5e5, scaling) / inverse_frequencies(128, 5e5, None)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(1 / scaling["factor"])
    assert (np.diff(ratio) <= 0).all()


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"rope scaling; expected .*yarn; got longrope"):
        inverse_frequencies(64, 1e4, {"rope_type": "longrope", "factor": 2.0})
