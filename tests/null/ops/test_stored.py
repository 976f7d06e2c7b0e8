"""Values in storage formats, and back."""

from __future__ import annotations

import numpy as np

from pegainfer.ops.float8 import from_e4m3
from pegainfer.ops.stored import held, held_like, plain


def test_bits_of_eight_bit_floats_and_bf16_stand_for_their_values() -> None:
    eight = from_e4m3(np.arange(256).astype(np.uint8))
    assert plain(held(eight, "f8_e4m3")).tobytes() == eight.tobytes()
    sixteen = np.array([1.0, -3.5, 2.0**-120, 65280.0, np.inf, 0.0], np.float32)  # which bf16 has
    assert plain(held(sixteen, "bf16")).tobytes() == sixteen.tobytes()


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    unit = 2.0**-7  # of 1
    given = np.array([1 + unit / 2, 1 + 3 * unit / 2, 1 + 0.49 * unit, 1 + 0.51 * unit, -1 - 0.51 * unit])
    want = [1, 1 + 2 * unit, 1, 1 + unit, -1 - unit]
    assert plain(held(given, "bf16")).tolist() == want
    assert np.isnan(plain(held(np.array([np.nan]), "bf16"))).all()


def test_plain_dtypes_are_numpys() -> None:
    halves = held(np.arange(3.0), "f16")
    assert halves.dtype == np.float16 and plain(halves) is halves


def test_values_are_stored_as_the_array_has_them() -> None:
    values = np.array([1.0, 2.0, -0.5])
    for dtype in ("f32", "f16", "bf16"):
        array = held(np.zeros(3), dtype)
        array[...] = held_like(values, array)
        assert plain(array).tolist() == values.tolist(), dtype
