"""Which weights are quantised while they are loaded, and to what."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.quantize_on_load import quantized_on_load
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.weight import Weight, float32
from tests.support.packers import E4M3_POSITIVE, e4m3_codes

RNG = np.random.default_rng(5)
VALUES = {
    "embed": RNG.standard_normal((96, 64)).astype(np.float32),
    "norm": RNG.standard_normal(64).astype(np.float32),
    "layers.0.w_up": RNG.standard_normal((64, 96)).astype(np.float32),
    "layers.0.w_experts": RNG.standard_normal((3, 64, 32)).astype(np.float32),
    "layers.0.w_router": RNG.standard_normal((128, 64)).astype(np.float32),
    "layers.0.w_gates": RNG.standard_normal((16, 64)).astype(np.float32),
    "layers.0.taps": RNG.standard_normal((64, 4)).astype(np.float32),
}


def plain() -> dict[str, Weight]:
    return {name: float32(v) for name, v in VALUES.items()}


@pytest.mark.parametrize(
    ("kind", "table", "linear", "experts"),
    [
        ("int4", "q8_0", "q4_1", "q4_1"),
        ("int8", "q8_0", "q8_0", "q8_0"),
        ("fp8", "f32", "fp8_r32", "fp8_r32"),
    ],
)
def test_wide_matrices_alone_are_quantised(kind: str, table: str, linear: str, experts: str) -> None:
    found = {name: w.dtype for name, w in quantized_on_load(plain(), kind).items()}
    chosen = {"embed": table, "layers.0.w_up": linear, "layers.0.w_experts": experts}
    assert found == dict.fromkeys(VALUES, "f32") | chosen


def test_values_are_those_of_the_levels() -> None:
    for name, w in quantized_on_load(plain(), "int4").items():
        if w.dtype == "f32":
            continue
        raw = quantized_weight(w.dtype, VALUES[name]).parts["values"].bytes()
        want = dequantize(w.dtype, raw, w.shape)
        np.testing.assert_array_equal(w.values(), want)
        np.testing.assert_array_equal(w.in_form().values(), want)
        np.testing.assert_array_equal(w.take(len(w.shape) - 2, [range(8, 40)]).values(), want[..., 8:40, :])


def test_what_is_quantised_in_the_file_stays() -> None:
    w = quantized_weight("q5_0", VALUES["layers.0.w_up"])
    assert quantized_on_load({"w": w}, "int8")["w"] is w


def test_fp8_has_one_scale_a_row() -> None:
    """The greatest magnitude of a row is 448 steps, and each value the nearest E4M3 one."""
    values = VALUES["layers.0.w_experts"] * np.float32(37)
    weight = quantized_on_load({"layers.0.w_experts": float32(values)}, "fp8")["layers.0.w_experts"]
    scale = np.abs(values).max(-1, keepdims=True) / np.float32(448)
    codes = e4m3_codes(values / scale)
    want = np.where(codes < 128, 1, -1) * E4M3_POSITIVE[codes & 127] * scale
    got = weight.values()
    np.testing.assert_allclose(got, want, rtol=2.0**-22)
    np.testing.assert_array_equal(weight.take(1, [range(8, 40)]).values(), got[:, 8:40])


def test_rows_of_zeros_and_of_tiny_numbers_stay_so() -> None:
    values = np.zeros((64, 32), np.float32)
    values[1] = 1e-40
    values[2, 5] = 3
    got = quantized_on_load({"w": float32(values)}, "fp8")["w"].values()
    assert np.isfinite(got).all() and np.abs(got[:2]).max() <= 1e-40
    np.testing.assert_array_equal(got[2:], values[2:])
