"""A weight as a value: its storage scheme, its shape, and where each of its stored parts lies.

A table of weights is a plan of what to read. Backends read from it what they need, in their own layouts:
`Weight.parts` says which byte ranges of which file, `take` and `shard` narrow them down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import lcm, prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from pegainfer.contract.errors import ModelFileError, OpError
from pegainfer.runtime.weights.dequant import DECODERS, F32, dequantize
from pegainfer.runtime.weights.formats import FORMATS, NUMPY_NAMES
from pegainfer.runtime.weights.part import Memory, Part

Array = np.ndarray[Any, Any]
VALUES = "values"


class StoredPart(msgspec.Struct, frozen=True):
    """One of the arrays that a scheme stores for a matrix [N, K].

    Args:
        name: 'values', 'scales', 'zeros' …
        suffix: follows the module's name in a checkpoint: '.weight_scale_inv'.
        axes: of the stored array, in its order, as axes of the matrix and how many of its entries one stored
            entry covers: 'N K/8' for eight 4-bit values in a word, 'N/128 K/128' for a scale a tile, '' for
            one value.
        formats: storage formats that it may have, keys of FORMATS.
    """

    name: str
    suffix: str
    axes: str
    formats: tuple[str, ...]

    @property
    def steps(self) -> tuple[tuple[str, int], ...]:
        """(axis of the matrix, entries that one stored entry covers) of each stored axis."""
        return _steps(self.axes)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The stored array's shape for a vector [K], a matrix [N, K] or a stack [E, N, K]."""
        sizes = dict(zip("KN", reversed(shape), strict=False))
        stored = [-(-sizes[letter] // per) for letter, per in self.steps if letter in sizes]
        return (*shape[:-2], *(stored or [1]))


@cache
def _steps(axes: str) -> tuple[tuple[str, int], ...]:
    split = (axis.partition("/") for axis in axes.split())
    return tuple((letter, int(per or 1)) for letter, _, per in split)


class Scheme(msgspec.Struct, frozen=True):
    """How a weight is stored.

    Args:
        name: what errors call it; of a scheme without a form, also a tensor's dtype in programs.
        decode: the values of a matrix, float32 [N, K].
        form: the internal form that programs and kernels see in its place, a key of SCHEMES, for so many
            columns; None: the scheme is one itself.
        repack: a matrix in that form, in memory.
    """

    name: str
    parts: tuple[StoredPart, ...]
    decode: Callable[[Weight], F32]
    form: Callable[[int], str] | None = None
    repack: Callable[[Weight], Weight] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether values in one format are all that is stored."""
        return len(self.parts) == 1 and self.parts[0].formats == (self.name,)

    def multiple(self, letter: str) -> int:
        """A slice along this axis of the matrix begins and ends at multiples of it, or at the axis's end."""
        blocks = FORMATS[self.name].elements if self.is_plain and letter == "K" else 1
        return lcm(blocks, *(per for part in self.parts for axis, per in part.steps if axis == letter))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all parts, each in the first of its formats."""
        return sum(FORMATS[p.formats[0]].nbytes(prod(p.shape(shape))) for p in self.parts)


@cache
def plain(format_name: str) -> Scheme:
    """Values of one format and nothing else. `decode` raises UnsupportedError for one without a decoder."""
    part = StoredPart(VALUES, ".weight", "N K", (format_name,))
    return Scheme(format_name, (part,), lambda w: dequantize(format_name, w.parts[VALUES].bytes(), w.shape))


# Schemes that a program may name as the dtype of a weight.
SCHEMES: dict[str, Scheme] = {name: plain(name) for name in DECODERS}


class Shard(NamedTuple):
    """Part `rank` of `ranks` equal parts along an axis of the whole weight."""

    axis: int
    rank: int
    ranks: int


class Weight(msgspec.Struct, frozen=True):
    """A vector [K], a matrix [N, K], or a stack of E matrices (experts) [E, N, K].

    Args:
        shape: of what is here: of the shard, where `shard` is given.
        parts: by name, as the scheme declares them; empty: the values are to be made up.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    parts: Mapping[str, Part]
    shard: Shard | None = None

    def __post_init__(self) -> None:
        """Raises ModelFileError where the parts do not hold the shape in this scheme."""
        if not 1 <= len(self.shape) <= 3:
            raise OpError("shape of a weight", expected="[K], [N, K] or [E, N, K]", got=list(self.shape))
        for p in self.scheme.parts if self.parts else ():
            part = self.parts[p.name]
            if part.shape != p.shape(self.shape) or part.format not in p.formats:
                raise ModelFileError(
                    f"{p.name} of a {self.scheme.name} weight {list(self.shape)}",
                    expected=f"{list(p.shape(self.shape))} in {' or '.join(p.formats)}",
                    got=f"{list(part.shape)} in {part.format}",
                )

    @property
    def dtype(self) -> str:
        """What programs see: vectors are float32 on every backend, whatever their file has."""
        if len(self.shape) == 1:
            return "f32"
        return self.scheme.name if self.scheme.form is None else self.scheme.form(self.shape[-1])

    def take(self, axis: int, ranges: Sequence[range]) -> Weight:
        """The entries of one axis that `ranges` name, in this order; nothing is read.

        Raises OpError for ranges that cut what the scheme stores together, or that leave the axis.
        """
        size, letter = self.shape[axis], "ENK"[axis - len(self.shape)]
        multiple = self.scheme.multiple(letter)
        for r in ranges:
            whole = r.step == 1 and r.start % multiple == 0 and (r.stop % multiple == 0 or r.stop == size)
            if not (multiple == 1 or whole) or r.stop > size:
                raise OpError(
                    f"slice of axis {axis} of a {self.scheme.name} weight {list(self.shape)}",
                    expected=f"multiples of {multiple}, up to {size}",
                    got=r,
                    remedy="use a number of ranks that divides the axis into such multiples",
                )
        parts = {
            p.name: _take(p, self.parts[p.name], letter, ranges) for p in self.scheme.parts if self.parts
        }
        count = sum(len(r) for r in ranges)
        return replace(self, shape=(*self.shape[:axis], count, *self.shape[axis + 1 :]), parts=parts)

    def shard_of(self, axis: int, rank: int, ranks: int) -> Weight:
        """The shard of a rank. Raises OpError where the axis does not divide."""
        size = self.shape[axis]
        if size % ranks or not 0 <= rank < ranks:
            raise OpError(
                f"shard {rank} of axis {axis} of a weight {list(self.shape)}",
                expected=f"a divisor of {size} and a rank below it",
                got=f"{ranks} ranks",
            )
        each = size // ranks
        part = self.take(axis, [range(rank * each, (rank + 1) * each)])
        return replace(part, shard=Shard(axis, rank, ranks))

    def stacked(self, count: int) -> Weight:
        """This matrix [N, K] as a stack [count, N / count, K]; nothing is read.

        Raises OpError where its rows, or what the scheme stores together of them, do not divide.
        """
        rows, multiple = self.shape[0], self.scheme.multiple("N")
        if rows % count or (multiple != 1 and rows // count % multiple):
            raise OpError(
                f"a {self.scheme.name} weight {list(self.shape)} as a stack of {count}",
                expected=f"matrices of a multiple of {multiple} rows",
                got=f"{rows} rows",
            )
        parts = {
            name: p.reshape((count, p.shape[0] // count, *p.shape[1:])) for name, p in self.parts.items()
        }
        return replace(self, shape=(count, rows // count, *self.shape[1:]), parts=parts)

    def matrices(self) -> Iterator[Weight]:
        """Each matrix [N, K] of a stack, the matrix itself, or a vector as [1, K]."""
        if len(self.shape) == 2:
            yield self
        elif len(self.shape) == 1:
            parts = {name: p.reshape((1, *p.shape)) for name, p in self.parts.items()}
            yield replace(self, shape=(1, *self.shape), parts=parts)
        else:
            for e in range(self.shape[0]):
                one = self.take(0, [range(e, e + 1)])
                parts = {name: p.reshape(p.shape[1:]) for name, p in one.parts.items()}
                yield replace(one, shape=self.shape[1:], parts=parts)

    def arrays(self) -> dict[str, Array]:
        """The parts as NumPy arrays of their stored shapes.

        bf16 is widened to float32. Formats that NumPy lacks are bytes, [..., bytes a row] uint8.
        """
        return {name: _array(part) for name, part in self.parts.items()}

    def in_form(self) -> Weight:
        """A matrix or a stack in the internal form that `dtype` names; itself where it is in one already.

        Reads the parts. Raises OpError for columns in act order that were divided.
        """
        if self.scheme.repack is None:
            return self
        packed = [self.scheme.repack(w).parts[VALUES].bytes() for w in self.matrices()]
        return in_memory(self.dtype, self.shape, packed[0] if len(packed) == 1 else np.concatenate(packed))

    def values(self) -> F32:
        """The values, float32 of `shape`, freshly allocated. Raises UnsupportedError, ModelFileError."""
        decoded = [w.scheme.decode(w) for w in self.matrices()]
        return (decoded[0] if len(decoded) == 1 else np.stack(decoded)).reshape(self.shape)


def in_memory(format_name: str, shape: tuple[int, ...], data: Array) -> Weight:
    """A plain weight whose bytes, [nbytes] uint8, are in this process. Raises ModelFileError."""
    memory = Memory(np.ascontiguousarray(data).reshape(-1))
    part = Part.at(format_name, shape, memory, 0)
    if part.nbytes != memory.size:
        raise ModelFileError(
            f"bytes of a {format_name} weight {list(shape)}", expected=part.nbytes, got=memory.size
        )
    return Weight(plain(format_name), shape, {VALUES: part})


def float32(values: Array) -> Weight:
    """A weight of these values."""
    return in_memory("f32", values.shape, np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8))


def _take(declared: StoredPart, part: Part, letter: str, ranges: Sequence[range]) -> Part:
    """The same entries of a stored part: all of it where it does not run along that axis of the weight."""
    letters = [axis for axis, _ in declared.steps]
    stack = len(part.shape) - len(letters)
    if letter == "E":
        return part.take(0, ranges)
    if letter not in letters:
        return part
    axis = letters.index(letter)
    per = declared.steps[axis][1]
    return part.take(axis + stack, [range(r.start // per, -(-r.stop // per), r.step) for r in ranges])


def _array(part: Part) -> Array:
    raw = part.bytes()
    if part.format == "bf16":
        return dequantize("bf16", raw, part.shape)
    if part.format in NUMPY_NAMES:
        return raw.view(NUMPY_NAMES[part.format]).reshape(part.shape)
    return raw.reshape(*part.shape[:-1], part.width)
