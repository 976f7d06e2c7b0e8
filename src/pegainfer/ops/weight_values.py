"""Values of a weight that are read while the weights are planned, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.weight import VALUES, Weight, float32, in_memory

Array = np.ndarray[Any, Any]
BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}  # of an element, in formats without blocks


def read_values(weight: Weight) -> Array:
    """The values of a plain weight, float32, read from the file rather than from its mapping."""
    part = weight.parts[VALUES]
    return dequantize(part.format, _raw(weight), weight.shape)


def moved_values(weight: Weight, moves: Callable[[Array], Array]) -> Weight:
    """A plain weight with its values in other places: in its own format, or float32 where that has blocks.

    Args:
        moves: puts the entries of an array into other places; gets values, or their bits.
    """
    form = weight.parts[VALUES].format
    if form not in BITS:
        return float32(moves(read_values(weight)))
    found = np.ascontiguousarray(moves(_raw(weight).view(BITS[form]).reshape(weight.shape)))
    return in_memory(form, found.shape, found.reshape(-1).view(np.uint8))


def _raw(weight: Weight) -> Array:
    """The stored bytes, [nbytes] uint8, copied out of the file."""
    part = weight.parts[VALUES]
    raw = np.empty(part.nbytes, np.uint8)
    part.read(raw)
    return raw
