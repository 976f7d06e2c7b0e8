"""E4M3: every code, rounding, and what a weight may not hold."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.fp8 import E4M3, encode_e4m3, pack_fp8
from tests.support.packers import E4M3_POSITIVE, e4m3_codes


def test_codes_mean_what_the_standard_says() -> None:
    np.testing.assert_array_equal(E4M3[:127], E4M3_POSITIVE)
    np.testing.assert_array_equal(E4M3[128:255], -E4M3_POSITIVE)
    assert np.isnan(E4M3[[127, 255]]).all() and E4M3[126] == 448


def test_codes_survive_encoding() -> None:
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    np.testing.assert_array_equal(encode_e4m3(E4M3[codes]), codes)


def test_rounds_to_the_nearest_and_halves_to_even() -> None:
    middle = (E4M3_POSITIVE[1:] + E4M3_POSITIVE[:-1]) / 2
    near = np.concatenate(
        [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(999))]
    )
    spread = np.exp2(np.random.default_rng(3).uniform(-14, 8.8, 4000)).astype(np.float32)
    x = np.concatenate([near, -near, spread, [0, 1e-40, 2.0**-11]]).astype(np.float32)
    np.testing.assert_array_equal(encode_e4m3(x), e4m3_codes(x))


def test_larger_values_become_the_largest() -> None:
    assert encode_e4m3(np.array([449, 464, 1e38, -1e9], np.float32)).tolist() == [126, 126, 126, 254]


def test_a_weight_with_nan_is_refused() -> None:
    codes = np.zeros((2, 32), np.uint8)
    codes[1, 7] = 255
    with pytest.raises(ModelFileError, match="an FP8 weight holds NaN"):
        pack_fp8(32, codes, np.ones((2, 1), np.float32))
