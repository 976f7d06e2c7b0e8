"""How arrays hold values in a storage format: in NumPy's own dtype, or as the bits of one that it lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.float8 import E4M3, from_e4m3, to_e4m3
from pegainfer.ops.tensor import NUMPY
from pegainfer.runtime.bf16 import from_bf16, to_bf16

Array = np.ndarray[Any, Any]


def held(values: Array, dtype: str) -> Array:
    """The values rounded to a plain dtype, bf16 or e4m3."""
    if dtype == E4M3:
        return to_e4m3(values)
    if dtype == "bf16":
        return to_bf16(np.ascontiguousarray(values, np.float32))
    return values.astype(NUMPY[dtype])


def held_like(values: Array, array: Array) -> Array:
    """The values as `array` holds its own; plain dtypes convert where they are assigned."""
    return held(values, "bf16") if array.dtype == np.uint16 else values


def plain(array: Array) -> Array:
    """The values of an array: of uint8 and uint16 those that its bits stand for, else the array itself."""
    if array.dtype == np.uint16:
        return from_bf16(array)
    return from_e4m3(array) if array.dtype == np.uint8 else array
