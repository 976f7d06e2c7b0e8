"""Eight-bit floats of the KV cache, e4m3 as OCP's 8-bit formats define it: 4 bits of exponent, 3 of mantissa,
no infinities, 448 the largest. NumPy has none, so arrays hold their bits as uint8.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

E4M3 = "f8_e4m3"
LARGEST = 448.0
STEP = 2.0**-3  # of a value's power of two, between neighbours
LEAST = 2.0**-9  # the smallest value above 0, and the step below 2^-6


def _table() -> Array:
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    small = mantissa * LEAST
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, small, normal)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_VALUES = _table()


def from_e4m3(bits: Array) -> Array:
    """float32 values of uint8 bits."""
    values: Array = _VALUES[bits]
    return values


def to_e4m3(values: Array) -> Array:
    """Bits of the nearest numbers, ties to even; of what lies past the largest those of the largest."""
    given = np.asarray(values, np.float32)
    size = np.abs(given)
    # Midpoints between neighbours, which are exact in float32; a tie goes to the even one of both bits.
    middle = (_VALUES[:126] + _VALUES[1:127]) / 2
    found = np.searchsorted(middle, size, side="left")
    tie = (found < 126) & (size == middle[np.minimum(found, 125)]) & (found % 2 == 1)
    bits: Array = np.where(np.isnan(given), 127, found + tie) | np.signbit(given).astype(np.int64) << 7
    return bits.astype(np.uint8)
