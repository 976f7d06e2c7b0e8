"""Values of a weight that are read while the weights are planned, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.formats import FORMATS
from pegainfer.runtime.weights.weight import VALUES, Shard, Weight, float32, in_memory

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


def shares_of(weight: Weight, axis: int, sections: Sequence[int], rank: int, ranks: int) -> Weight:
    """A rank's share of each section of an axis, side by side. Columns of several sections are read.

    Args:
        sections: their sizes, which add up to the axis.

    Raises OpError where a section does not divide, or cuts what is stored together.
    """
    if any(size % ranks for size in sections):
        raise OpError(
            f"sections of axis {axis} of a weight {list(weight.shape)}",
            expected=f"multiples of {ranks} ranks", got=list(sections),
        )  # fmt: skip
    starts = accumulate(sections, initial=0)
    shares = [(start, size // ranks) for start, size in zip(starts, sections, strict=False)]
    ranges = [range(start + rank * each, start + (rank + 1) * each) for start, each in shares]
    last = axis == len(weight.shape) - 1 and len(ranges) > 1
    found = _columns(weight, ranges) if last else weight.take(axis, ranges)
    return msgspec.structs.replace(found, shard=Shard(axis, rank, ranks))


def _columns(weight: Weight, ranges: Sequence[range]) -> Weight:
    """Several ranges of the last axis of a plain weight, in its own format."""
    for columns in ranges:
        weight.take(len(weight.shape) - 1, [columns])  # raises OpError where it cuts a block
    if not weight.scheme.is_plain:
        raise OpError(
            f"columns of a {weight.scheme.name} weight {list(weight.shape)}",
            expected="one unbroken range, or values in one format", got=list(ranges),
        )  # fmt: skip
    form = FORMATS[weight.parts[VALUES].format]
    raw = _raw(weight).reshape(*weight.shape[:-1], -1)
    parts = [raw[..., form.nbytes(r.start) : form.nbytes(r.stop)] for r in ranges]
    shape = (*weight.shape[:-1], sum(map(len, ranges)))
    return in_memory(weight.parts[VALUES].format, shape, np.concatenate(parts, axis=-1))


def unmovable(weight: Weight, tensor: str, path: Path) -> UnsupportedError:
    """Of a matrix whose values a line keeps in another order than its file."""
    return UnsupportedError(
        f"tensor {tensor}: this line keeps its values in another order, which its quantised form"
        " does not allow",
        expected="f32, f16 or bf16", got=weight.scheme.name, where=path,
        remedy="use a checkpoint whose config leaves this module out of its quantisation",
    )  # fmt: skip
