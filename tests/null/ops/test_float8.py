"""Eight-bit floats against their definition, number by number."""

from __future__ import annotations

import numpy as np

from pegainfer.ops.float8 import from_e4m3, to_e4m3

BITS = np.arange(256).astype(np.uint8)
VALUES = from_e4m3(BITS)


def test_values() -> None:
    """The table of the OCP 8-bit floating point specification, revision 1.0."""
    for bits, value in {
        0x00: 0.0, 0x01: 2.0**-9, 0x07: 7 * 2.0**-9, 0x08: 2.0**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0,
        0xFE: -448.0, 0xB8: -1.0,
    }.items():  # fmt: skip
        assert VALUES[bits] == value, bits
    assert np.flatnonzero(np.isnan(VALUES)).tolist() == [0x7F, 0xFF]
    assert VALUES[0x80] == 0 and np.signbit(VALUES[0x80])


def test_every_number_is_itself() -> None:
    assert to_e4m3(VALUES).tobytes() == BITS.tobytes()


def test_rounding_is_to_the_nearest_and_ties_to_even() -> None:
    numbers = VALUES[:127]
    middle = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(126) % 2 == 0, np.arange(126), np.arange(1, 127))
    assert to_e4m3(middle).tolist() == even.tolist()
    assert to_e4m3(np.nextafter(middle, np.float32(-1))).tolist() == list(range(126))
    assert to_e4m3(np.nextafter(middle, np.float32(1e9))).tolist() == list(range(1, 127))
    assert to_e4m3(-middle).tolist() == (even | 0x80).tolist()


def test_what_is_too_large_is_the_largest_and_nan_stays() -> None:
    given = np.array([448.01, 464, 480, 1e30, np.inf, -np.inf, np.nan, -1e4], np.float32)
    assert to_e4m3(given).tolist() == [0x7E] * 5 + [0xFE, 0x7F, 0xFE]
