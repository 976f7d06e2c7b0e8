"""Where a stored array lies: rows of bytes in files or in memory. Nothing is read until it is asked for.

NumPy is imported where arrays are made: a process that reads only metadata starts without it (0.1 s, 15 MB).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from pegainfer.contract.errors import ModelFileError, OpError
from pegainfer.runtime.weights.formats import FORMATS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Array = np.ndarray[Any, Any]


class Source(Protocol):
    """Bytes that parts point into: an open weights file, or memory."""

    @property
    def size(self) -> int: ...

    def view(self) -> Bytes:
        """All bytes, [size] uint8, read-only; nothing is copied. Raises ModelFileError once it is closed."""

    def read(self, extent: Extent, into: Bytes) -> None:
        """Copies the extent's rows, without gaps, into [rows * width] uint8.

        Raises ModelFileError where the bytes cannot be read.
        """

    def forget(self, extent: Extent) -> None:
        """The process need not keep these bytes in memory; they may still be read again."""


class Extent(NamedTuple):
    """Rows at equal distances in one source: row i is the `width` bytes from `offset + i * pitch` on."""

    source: Source
    offset: int
    rows: int
    pitch: int
    width: int

    @property
    def end(self) -> int:
        return self.offset + (self.rows - 1) * self.pitch + self.width

    @property
    def is_contiguous(self) -> bool:
        return self.rows == 1 or self.pitch == self.width

    def select(self, rows: range) -> Extent:
        offset = self.offset + rows.start * self.pitch
        return self._replace(offset=offset, rows=len(rows), pitch=self.pitch * rows.step)

    def mapped(self) -> Bytes:
        """[rows, width] uint8, a read-only view of the source."""
        import numpy as np

        first = self.source.view()[self.offset : self.end]
        shape, strides = (self.rows, self.width), (self.pitch, 1)
        return np.lib.stride_tricks.as_strided(first, shape, strides, writeable=False)


class Part(msgspec.Struct, frozen=True, dict=True):
    """A stored array of one format, such as a weight's values or its scales.

    Args:
        format: a key of FORMATS.
        shape: NumPy order; blocks of the format run along the last axis.
        extents: its rows (all axes but the last, flattened) in order.
    """

    format: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]

    def __post_init__(self) -> None:
        """Raises ModelFileError where the extents do not hold the shape: kernels read without checking."""
        rows, width, held = prod(self.shape[:-1]), self.width, 0
        for e in self.extents:
            held += e.rows if e.width == width else 0
            if e.offset < 0 or e.pitch < 0 or e.end > e.source.size:
                raise ModelFileError(
                    "rows outside of their source", expected=f"≤ {e.source.size} bytes", got=e.end
                )
        if held != rows:
            raise ModelFileError(
                f"bytes of a {self.format} array {list(self.shape)}",
                expected=f"{rows} rows of {width} bytes",
                got=f"{held} of them",
            )

    @classmethod
    def at(cls, format_name: str, shape: tuple[int, ...], source: Source, offset: int) -> Part:
        """An array that lies row after row from `offset` on. Raises ModelFileError."""
        shape = shape or (1,)
        rows, width = prod(shape[:-1]), _width(format_name, shape)
        extents = (Extent(source, offset, rows, width, width),) if rows and width else ()
        return cls(format_name, shape, extents)

    @classmethod
    def stacked(cls, parts: Sequence[Part]) -> Part:
        """Equal arrays, such as one of each expert, under a new first axis."""
        return cls(parts[0].format, (len(parts), *parts[0].shape), sum((p.extents for p in parts), ()))

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return _width(self.format, self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.width

    def reshape(self, shape: tuple[int, ...]) -> Part:
        """The same bytes under other axes. Raises ModelFileError where rows with gaps would differ."""
        if shape == self.shape:
            return self
        if len(self.extents) == 1 and self.extents[0].is_contiguous:
            return Part.at(self.format, shape, self.extents[0].source, self.extents[0].offset)
        return Part(self.format, shape, self.extents)

    def take(self, axis: int, ranges: Sequence[range]) -> Part:
        """The entries of one axis that `ranges` name, in this order; of the last axis one unbroken range.

        Raises OpError for anything else.
        """
        size, last = self.shape[axis], len(self.shape) - 1
        if any(r.step < 1 or not 0 <= r.start <= r.stop for r in ranges) or (
            any(r and r[-1] >= size for r in ranges)
        ):
            raise OpError(f"entries of axis {axis} of {list(self.shape)}", expected=f"< {size}", got=ranges)
        shape = (*self.shape[:axis], sum(len(r) for r in ranges), *self.shape[axis + 1 :])
        if axis == last:
            return Part(self.format, shape, self._columns(ranges))
        inner = prod(self.shape[axis + 1 : last])
        rows = [
            whole
            for matrix in range(prod(self.shape[:axis]))
            for r in ranges
            for whole in _rows_of(range(r.start + matrix * size, r.stop + matrix * size, r.step), inner)
        ]
        return Part(self.format, shape, tuple(e for r in rows for e in self._select(r)))

    def read(self, into: Bytes) -> None:
        """Copies all rows into [nbytes] uint8. Raises ModelFileError."""
        at = 0
        for e in self.extents:
            e.source.read(e, into[at : at + e.rows * e.width])
            at += e.rows * e.width

    def forget(self) -> None:
        """The process need not keep the rows in memory. Called once a backend has its own copy of them."""
        for e in self.extents:
            e.source.forget(e)

    def bytes(self) -> Bytes:
        """[nbytes] uint8: a view of the source where the rows lie without gaps, else a copy."""
        import numpy as np

        if len(self.extents) == 1 and self.extents[0].is_contiguous:
            return self.extents[0].source.view()[self.extents[0].offset : self.extents[0].end]
        rows = [e.mapped().reshape(-1) for e in self.extents]
        return np.concatenate(rows) if rows else np.empty(0, np.uint8)

    def addresses(self) -> Array:
        """Where each row lies in this process's memory, [rows] int64, while the sources are open."""
        import numpy as np

        sources = {id(e.source): e.source for e in self.extents}
        bases = {key: source.view().ctypes.data for key, source in sources.items()}
        rows = [bases[id(e.source)] + e.offset + e.pitch * np.arange(e.rows) for e in self.extents]
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of each extent."""
        return list(accumulate((e.rows for e in self.extents), initial=0))[:-1]

    def _select(self, rows: range) -> Iterator[Extent]:
        """Rows start, start + step, …, of which each extent gives its own."""
        at = rows.start
        while at < rows.stop:
            i = bisect_right(self._starts, at) - 1
            extent, first = self.extents[i], self._starts[i]
            inside = range(at - first, min(rows.stop - first, extent.rows), rows.step)
            yield extent.select(inside)
            at += len(inside) * rows.step

    def _columns(self, ranges: Sequence[range]) -> tuple[Extent, ...]:
        form = FORMATS[self.format]
        r = ranges[0]
        if len(ranges) != 1 or r.step != 1 or r.start % form.elements:
            raise OpError(
                f"columns of a {self.format} array", expected="one unbroken range of whole blocks", got=ranges
            )
        first, width = form.nbytes(r.start), form.nbytes(len(r))
        return tuple(e._replace(offset=e.offset + first, width=width) for e in self.extents)


class Memory(msgspec.Struct, frozen=True):
    """Bytes of this process as a Source: [size] uint8, C-contiguous."""

    data: Bytes

    @property
    def size(self) -> int:
        return self.data.nbytes

    def view(self) -> Bytes:
        return self.data

    def read(self, extent: Extent, into: Bytes) -> None:
        into.reshape(extent.rows, extent.width)[...] = extent.mapped()

    def forget(self, extent: Extent) -> None:
        """These bytes are all that there is of them."""


def _width(format_name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a row. Raises ModelFileError where blocks of the format do not fill it."""
    form = FORMATS[format_name]
    if shape[-1] % form.elements:
        raise ModelFileError(
            f"width of a {format_name} array", expected=f"a multiple of {form.elements}", got=list(shape)
        )
    return form.nbytes(shape[-1])


def _rows_of(entries: range, inner: int) -> list[range]:
    """The rows of entries that have `inner` rows each."""
    if inner == 1:
        return [entries]
    if entries.step == 1:
        return [range(entries.start * inner, entries.stop * inner)]
    return [range(i * inner, (i + 1) * inner) for i in entries]
