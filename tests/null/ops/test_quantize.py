"""Quantisers: equal to ggml's reference bit for bit, within half a step, exact where a value is a step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.quantize import quantize, quantized_weight
from pegainfer.runtime.weights.dequant import dequantize

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "ops" / "quantize.json").read_text())


@pytest.mark.parametrize("name", sorted(GOLDEN["cases"]))
def test_equals_the_gguf_package(name: str) -> None:
    values = np.frombuffer(bytes.fromhex(GOLDEN["float32"]), "<f4").reshape(GOLDEN["shape"])
    assert quantize(name, values).tobytes().hex() == GOLDEN["cases"][name]


def round_trip(name: str, values: np.ndarray) -> np.ndarray:
    return dequantize(name, quantize(name, values), values.shape).astype(np.float64)


# The largest error as a share of the block's step, beside the rounding of the scale to float16.
@pytest.mark.parametrize(
    ("name", "levels", "spread"),
    [
        ("q8_0", 127, "peak"),
        ("q4_0", 8, "peak"),
        ("q4_1", 15, "range"),
        ("q5_0", 16, "peak"),
        ("q5_1", 31, "range"),
    ],
)
def test_error_is_half_a_step(name: str, levels: int, spread: str) -> None:
    values = np.random.default_rng(0).standard_normal((40, 96), np.float32)
    blocks = values.reshape(-1, 32).astype(np.float64)
    size = np.abs(blocks).max(1) if spread == "peak" else np.ptp(blocks, axis=1)
    step = (size / levels)[:, None]
    error = np.abs(round_trip(name, values).reshape(-1, 32) - blocks)
    scale_rounding = 2.0**-11 * (levels * step + np.abs(blocks.min(1, keepdims=True)))
    # q4_0 and q5_0 have no level for the far end of the other sign: up to one step is lost there
    allowed = step * (1.0 if name in ("q4_0", "q5_0") else 0.5) + scale_rounding
    assert (error <= allowed).all()
    assert (error > step / 4).mean() > 0.3, "an error this small would mean that nothing was rounded"


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "f16", "bf16", "f32"])
def test_steps_survive(name: str) -> None:
    """Small whole numbers with the block's extremes present are levels of every format."""
    values = np.tile(np.arange(-8, 8, dtype=np.float32), (3, 2))
    if name == "q8_0":
        values[:, 0] = -127
    np.testing.assert_array_equal(round_trip(name, values), values)


@pytest.mark.parametrize(("name", "group", "steps"), [("q4_k", 32, 15), ("q5_k", 32, 31), ("q6_k", 16, 32)])
def test_superblocks_err_by_their_steps(name: str, group: int, steps: int) -> None:
    """Half a step of the group, and what 6 or 8 bits leave of its step and minimum."""
    values = np.random.default_rng(3).standard_normal((6, 512), np.float32)
    values[0] = np.abs(values[0])  # no minimum
    values[1, :256] = 0
    values[2] -= 3
    groups, supers = values.reshape(-1, group).astype(np.float64), values.reshape(-1, 256)
    span = np.maximum(groups.max(1), 0) - np.minimum(groups.min(1), 0)
    size = np.abs(groups).max(1) if name == "q6_k" else span
    most = np.repeat(np.abs(supers).max(1) * 2, 256 // group)
    allowed = size / steps * (1.0 if name == "q6_k" else 0.5) + most / (127 if name == "q6_k" else 63)
    error = np.abs(round_trip(name, values).reshape(-1, group) - groups)
    assert (error <= allowed[:, None]).all()
    assert 0.01 < np.sqrt((error**2).mean()) < {"q4_k": 0.09, "q5_k": 0.05, "q6_k": 0.025}[name]


def test_superblocks_take_their_own_values_again() -> None:
    """What a file's levels mean is met exactly when it is quantised anew."""
    for name in ("q4_k", "q5_k", "q6_k"):
        once = round_trip(name, np.random.default_rng(4).standard_normal((2, 256), np.float32))
        assert np.abs(round_trip(name, once.astype(np.float32)) - once).max() < 0.03


def test_half_away_from_zero_and_scale_below_float16() -> None:
    halves = np.full((1, 32), 0.5, np.float32)
    halves[0, :2] = 127, -2.5
    np.testing.assert_array_equal(round_trip("q8_0", halves)[0, :3], [127, -3, 1])
    tiny = np.full((1, 32), 1e-8, np.float32)
    for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1"):
        assert np.isfinite(round_trip(name, tiny)).all()


def test_bf16_rounds_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000], np.uint32)
    assert quantize("bf16", bits.view(np.float32)).view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


def test_quantized_weight_and_unknown_format() -> None:
    w = quantized_weight("q4_1", np.zeros((3, 64), np.float32))
    assert (w.dtype, w.shape, w.parts["values"].nbytes) == ("q4_1", (3, 64), 3 * 2 * 20)
    with pytest.raises(UnsupportedError, match=r"no quantiser.*q8_0.*got iq3_s"):
        quantize("iq3_s", np.zeros((1, 256), np.float32))
