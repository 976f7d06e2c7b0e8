"""GGUF version 2 and 3: metadata and tensor table, read by mmap and validated before use.

Layout (all little-endian): magic, version u32, tensor count u64, metadata count u64; the metadata as key,
type u32, value; the tensor table as name, number of dims u32, dims u64 (contiguous axis first), type u32,
offset u64; padding to the alignment; data. A string is a u64 length and its bytes; an array is an element
type u32, a count u64 and its elements.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, overload

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.cursor import U64, Cursor
from pegainfer.runtime.weights.formats import FORMATS, GGML_TYPES
from pegainfer.runtime.weights.tensorfile import MappedFile, TensorFile, TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# Far above any real file, and low enough that a lying count costs little before it is found out.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_COUNT = 1 << 24
MAX_DIMS = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
# Number types as memoryview.cast and struct name them; these match the file on a little-endian machine.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class StringArray(Sequence[str]):
    """A string array of the file, decoded only when iterated. Valid while the file is open."""

    def __init__(self, buffer: memoryview, count: int, where: str) -> None:
        """`buffer` spans the elements exactly: the reader has walked them."""
        self._buffer = buffer
        self._count = count
        self._where = where

    def __len__(self) -> int:
        return self._count

    def to_list(self) -> list[str]:
        """All elements decoded. Raises ModelFileError where one is not UTF-8."""
        data, at, length = bytes(self._buffer), 0, U64.unpack_from
        found: list[str] = []
        append = found.append
        try:
            for _ in range(self._count):
                start = at + 8
                at = start + length(data, at)[0]
                append(data[start:at].decode())
        except UnicodeDecodeError as e:
            raise ModelFileError(
                "string is not UTF-8", got=repr(e.object[:32]), where=f"{self._where}[{len(found)}]"
            ) from None
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """O(n): meant for a glance; who wants many takes `to_list`."""
        return self.to_list()[index]

    def __repr__(self) -> str:
        return f"<{self._count} strings of {self._where}>"


Value = int | float | bool | str | memoryview | StringArray


class GGUF(TensorFile, Protocol):
    """A model of this format, in one file or in parts."""

    @property
    def metadata(self) -> Mapping[str, Value]: ...


class GGUFFile(MappedFile):
    """One open GGUF file, which may be a part of a split model (gguf_split.open_gguf).

    `metadata` holds scalars, strings, typed memoryviews for arrays and StringArrays.

    Opening walks over the lengths in string arrays (0.02 s for 98,000 strings) and decodes none of them.
    Arrays of the metadata are views and go when the file is closed; scalars and strings stay.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ModelFileError where the file is missing, truncated or contradicts itself."""
        super().__init__(path)
        self.metadata: Mapping[str, Value] = {}
        try:
            self._read(Cursor(memoryview(self._map), str(self._path)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        kept = {k: v for k, v in self.metadata.items() if isinstance(v, int | float | str)}
        self.metadata = kept  # views would keep the mapping alive
        super().close()

    def _read(self, c: Cursor) -> None:
        magic = bytes(c.take(min(4, c.size)))
        if magic != MAGIC:
            c.fail("not a GGUF file", expected=repr(MAGIC), got=repr(magic), at=0)
        self.version = c.u32()
        if self.version not in VERSIONS:
            big_endian = int.from_bytes(self.version.to_bytes(4, "little"), "big") in VERSIONS
            c.fail(
                "unsupported GGUF version",
                expected="2 or 3, little-endian",
                got=f"{self.version}{' (a big-endian file)' if big_endian else ''}",
                at=4,
            )
        tensor_count = c.count("tensor count", MAX_TENSORS, least_bytes=24)
        key_count = c.count("metadata count", MAX_KEYS, least_bytes=13)
        self.metadata = _read_metadata(c, key_count)
        self.alignment = self._alignment(c)
        self._place(c, _read_table(c, tensor_count, self.alignment))

    def _alignment(self, c: Cursor) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            shown = value if isinstance(value, int | float) else type(value).__name__
            c.fail("general.alignment is wrong", expected=f"a power of two ≤ {MAX_ALIGNMENT}", got=shown)
        return value

    def _place(self, c: Cursor, table: dict[str, TensorInfo]) -> None:
        """Checks the tensors against each other and the file's end, and makes their offsets absolute."""
        base = -(-c.at // self.alignment) * self.alignment
        end, before = base, "the header"
        for info in sorted(table.values(), key=lambda t: t.offset):
            start = base + info.offset
            if start < end:
                c.fail(
                    f"tensor {info.name} overlaps {before}", expected=f"start ≥ {end}", got=start, at=start
                )
            end, before = start + info.nbytes, info.name
            if end > c.size:
                c.fail(
                    f"tensor {info.name} ends past the file",
                    expected=f"{end} bytes",
                    got=c.size,
                    at=start,
                    remedy="the file is truncated: fetch it again",
                )
        self._tensors.update((n, t._replace(offset=base + t.offset)) for n, t in table.items())


def _read_metadata(c: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        at = c.at
        key = c.string("metadata key", MAX_KEY_BYTES)
        if not key or key in metadata:
            c.fail("metadata key is empty or given twice", got=f"{key!r:.100}", at=at)
        kind = c.u32()
        what = f"metadata {key!r:.100}"
        if kind == _ARRAY:
            metadata[key] = _read_array(c, what)
        elif kind == _STRING:
            metadata[key] = c.string(what, MAX_STRING_BYTES)
        else:
            metadata[key] = _read_numbers(c, what, kind, 1)[0]
    return metadata


def _read_array(c: Cursor, what: str) -> memoryview | StringArray:
    at = c.at
    kind = c.u32()
    if kind == _ARRAY:
        c.fail(f"{what}: arrays of arrays are not read", expected="scalars or strings", at=at)
    if kind == _STRING:
        count = c.count(f"{what}: array length", MAX_ARRAY_COUNT, least_bytes=8)
        return StringArray(c.skip_strings(what, count), count, f"{c.where}: {what}")
    size = struct.calcsize(_number_code(c, what, kind))
    return _read_numbers(c, what, kind, c.count(f"{what}: array length", MAX_ARRAY_COUNT, least_bytes=size))


def _read_numbers(c: Cursor, what: str, kind: int, count: int) -> memoryview:
    code = _number_code(c, what, kind)
    at = c.at
    raw = c.take(count * struct.calcsize(code))
    if kind == _BOOL and count and max(raw) > 1:
        c.fail(f"{what}: not a bool", expected="0 or 1", got=max(raw), at=at)
    numbers: memoryview = raw.cast(code)  # type: ignore[call-overload]
    return numbers


def _number_code(c: Cursor, what: str, kind: int) -> str:
    code = _NUMBERS.get(kind)
    if code is None:
        c.fail(f"{what}: unknown metadata type", expected="0 to 12", got=kind, at=c.at - 4)
    return code


def _read_table(c: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table; offsets still count from the start of the data."""
    table: dict[str, TensorInfo] = {}
    for _ in range(count):
        at = c.at
        info = _read_tensor(c, alignment)
        if info.name in table:
            c.fail("tensor is given twice", got=repr(info.name), at=at)
        table[info.name] = info
    return table


def _read_tensor(c: Cursor, alignment: int) -> TensorInfo:
    at = c.at
    name = c.string("tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    rank = c.u32()
    if not 1 <= rank <= MAX_DIMS:
        c.fail(f"{what}: wrong number of dims", expected=f"1 to {MAX_DIMS}", got=rank, at=at)
    dims = [c.u64() for _ in range(rank)]
    kind, offset = c.u32(), c.u64()
    format_name = GGML_TYPES.get(kind)
    if format_name is None:
        c.fail(f"{what}: unknown ggml type", expected="a type that GGUF version 3 defines", got=kind, at=at)
    block = FORMATS[format_name]
    if min(dims) < 1 or dims[0] % block.elements:
        wanted = f"dims ≥ 1, the first a multiple of {block.elements} ({format_name} blocks)"
        c.fail(f"{what}: impossible shape", expected=wanted, got=dims, at=at)
    if offset % alignment:
        c.fail(f"{what}: offset is not aligned", expected=f"a multiple of {alignment}", got=offset, at=at)
    count = 1
    for d in dims:
        count *= d
    return TensorInfo(name, format_name, tuple(reversed(dims)), offset, block.nbytes(count))
