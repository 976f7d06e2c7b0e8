"""Values of a weight that are read while the weights are planned, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.weight import VALUES, Weight, float32, in_memory

Array = np.ndarray[Any, Any]
BITS = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}  # of an element, in formats without blocks


def read_values(weight: Weight) -> Array:
    """The values of a plain weight, float32, read from the file rather than from its mapping."""
    part = weight.parts[VALUES]
    return dequantize(part.format, _raw(weight), weight.shape)


def moved_values(weight: Weight, moves: Callable[[Array], Array], tensor: str, path: Path) -> Weight:
    """A plain weight with its values in other places: in its own format, or float32 where that has blocks.

    Args:
        moves: puts the entries of an array into other places; gets values, or their bits.
        tensor, path: for the error.

    Raises UnsupportedError for a checkpoint's quantised form.
    """
    if weight.scheme.form is not None:
        raise unmovable(weight, tensor, path)
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


def take_rows(weight: Weight, rows: Sequence[range] | None, tensor: str, path: Path) -> Weight:
    """These rows of each matrix, not copied; None: all. Raises UnsupportedError if its form forbids it."""
    if rows is None:
        return weight
    try:
        return weight.take(len(weight.shape) - 2, rows)
    except OpError:  # a word or a group holds several rows
        raise unmovable(weight, tensor, path) from None


def unmovable(weight: Weight, tensor: str, path: Path) -> UnsupportedError:
    """Of a matrix whose values a line keeps in another order than its file."""
    return UnsupportedError(
        f"tensor {tensor}: this line keeps its values in another order, which its quantised form"
        " does not allow",
        expected="f32, f16 or bf16", got=weight.scheme.name, where=path,
        remedy="use a checkpoint whose config leaves this module out of its quantisation",
    )  # fmt: skip
