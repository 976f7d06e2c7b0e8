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
from typing import NoReturn, overload

import numpy as np
import numpy.typing as npt

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.formats import FORMATS, GGML_TYPES
from pegainfer.runtime.weights.tensorfile import MappedFile, TensorInfo

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

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """A string array of the file, decoded only when iterated. Valid while the file is open."""

    def __init__(self, buffer: memoryview, count: int, where: str) -> None:
        """`buffer` spans the elements exactly: the reader has walked them."""
        self._buffer = buffer
        self._count = count
        self._where = where

    def __len__(self) -> int:
        return self._count

    def raw(self) -> Iterator[bytes]:
        """The elements' bytes in order."""
        buffer, at, length = self._buffer, 0, _U64.unpack_from
        for _ in range(self._count):
            start = at + 8
            at = start + length(buffer, at)[0]
            yield bytes(buffer[start:at])

    def __iter__(self) -> Iterator[str]:
        """Raises ModelFileError at an element that is not UTF-8."""
        index = 0
        try:
            for item in self.raw():
                yield item.decode()
                index += 1
        except UnicodeDecodeError as e:
            raise ModelFileError(
                "string is not UTF-8", got=repr(e.object[:32]), where=f"{self._where}[{index}]"
            ) from None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """O(n): meant for a glance; who wants many takes `list(array)`."""
        return list(self)[index]

    def __repr__(self) -> str:
        return f"<{self._count} strings of {self._where}>"


Value = int | float | bool | str | npt.NDArray[np.generic] | StringArray


class GGUFFile(MappedFile):
    """An open GGUF file. `metadata` holds scalars, strings, read-only NumPy arrays and StringArrays.

    Opening costs one walk over the string arrays' lengths (12 ms for 98,000 strings) and decodes none.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ModelFileError where the file is missing, truncated or contradicts itself."""
        super().__init__(path)
        self._view = memoryview(self._map)
        self._at = 0
        self._metadata: dict[str, Value] = {}
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    @property
    def metadata(self) -> Mapping[str, Value]:
        return self._metadata

    def close(self) -> None:
        """Idempotent. Tensor views and metadata arrays that are still held keep the mapping alive."""
        self._metadata.clear()
        try:
            self._view.release()
        except BufferError:  # a StringArray is still held
            self._closed = True
            return
        super().close()

    # Reading; every method moves self._at forward and raises ModelFileError.

    def _read(self) -> None:
        if self._view[:4] != MAGIC:
            self._fail("not a GGUF file", expected=repr(MAGIC), got=repr(bytes(self._view[:4])), at=0)
        self._at = 4
        self.version = self._u32()
        if self.version not in VERSIONS:
            big = int.from_bytes(self.version.to_bytes(4, "little"), "big") in VERSIONS
            self._fail(
                "unsupported GGUF version" + (" (a big-endian file)" if big else ""),
                expected="2 or 3, little-endian",
                got=self.version,
                at=4,
            )
        tensor_count = self._count("tensor count", MAX_TENSORS, least_bytes=24)
        key_count = self._count("metadata count", MAX_KEYS, least_bytes=13)
        for _ in range(key_count):
            self._read_pair()
        self._refuse_split()
        self.alignment = self._alignment()
        self._read_tensors(tensor_count)

    def _read_pair(self) -> None:
        at = self._at
        key = self._string("metadata key", MAX_KEY_BYTES)
        if not key or key in self._metadata:
            self._fail("metadata key is empty or given twice", got=repr(key), at=at)
        kind = self._u32()
        if kind == _ARRAY:
            self._metadata[key] = self._array(key)
        elif kind == _STRING:
            self._metadata[key] = self._string(key, MAX_STRING_BYTES)
        else:
            self._metadata[key] = self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> int | float | bool:
        if kind == _BOOL:
            byte = self._take(1)[0]
            if byte > 1:
                self._fail(f"{key}: not a bool", expected="0 or 1", got=byte, at=self._at - 1)
            return bool(byte)
        dtype = self._dtype(key, kind)
        value: int | float = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return value

    def _array(self, key: str) -> Value:
        kind = self._u32()
        if kind == _STRING:
            count = self._count(f"{key}: array length", MAX_ARRAY_COUNT, least_bytes=8)
            return self._string_array(key, count)
        if kind == _ARRAY:
            self._fail(
                f"{key}: arrays of arrays are not read", expected="scalars or strings", at=self._at - 4
            )
        dtype = np.dtype(np.uint8) if kind == _BOOL else self._dtype(key, kind)
        count = self._count(f"{key}: array length", MAX_ARRAY_COUNT, least_bytes=dtype.itemsize)
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                self._fail(
                    f"{key}: not a bool", expected="0 or 1", got=int(values.max()), at=self._at - count
                )
            return values.view(np.bool_)
        return values

    def _string_array(self, key: str, count: int) -> StringArray:
        view, size, length = self._view, self.size, _U64.unpack_from
        start = at = self._at
        try:
            for _ in range(count):
                at += 8 + length(view, at)[0]
        except struct.error:  # the length itself would lie past the end
            at = size + 1
        if at > size:
            self._fail(f"{key}: strings end past the file", expected=f"≤ {size} bytes", got=at, at=start)
        self._at = at
        return StringArray(view[start:at], count, f"{self._path}: {key}")

    def _dtype(self, key: str, kind: int) -> np.dtype[np.generic]:
        code = _SCALARS.get(kind)
        if code is None:
            self._fail(f"{key}: unknown metadata type", expected="0 to 12", got=kind, at=self._at - 4)
        return np.dtype(code)

    def _refuse_split(self) -> None:
        parts = self._metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ModelFileError(
                "this is one part of a split GGUF",
                expected="a whole model in one file",
                got=f"split.count {parts}",
                where=self._path,
                remedy="merge the parts with llama-gguf-split --merge",
            )

    def _alignment(self) -> int:
        value = self._metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self._fail(
                "general.alignment is wrong",
                expected=f"a power of two ≤ {MAX_ALIGNMENT}",
                got=value if isinstance(value, int | float) else type(value).__name__,
                at=self._at,
            )
        return value

    def _read_tensors(self, count: int) -> None:
        found: dict[str, TensorInfo] = {}
        for _ in range(count):
            info = self._tensor_info()
            if info.name in found:
                self._fail("tensor is given twice", got=repr(info.name), at=self._at)
            found[info.name] = info
        base = -(-self._at // self.alignment) * self.alignment
        end, before = base, "the header"
        for info in sorted(found.values(), key=lambda t: t.offset):
            start = base + info.offset
            if start < end:
                self._fail(f"tensors {before} and {info.name} overlap", expected=f"start ≥ {end}", got=start)
            end, before = start + info.nbytes, info.name
            if end > self.size:
                self._fail(
                    f"tensor {info.name} ends past the file",
                    expected=f"{end} bytes",
                    got=f"{self.size}",
                    remedy="the file is truncated: fetch it again",
                )
        self._tensors.update((n, t._replace(offset=base + t.offset)) for n, t in found.items())

    def _tensor_info(self) -> TensorInfo:
        """The next table entry; its offset still counts from the start of the data."""
        at = self._at
        name = self._string("tensor name", MAX_NAME_BYTES)
        rank = self._u32()
        if not 1 <= rank <= MAX_DIMS:
            self._fail(f"tensor {name}: wrong number of dims", expected=f"1 to {MAX_DIMS}", got=rank, at=at)
        dims = [self._u64() for _ in range(rank)]
        kind, offset = self._u32(), self._u64()
        format_name = GGML_TYPES.get(kind)
        if format_name is None:
            self._fail(
                f"tensor {name}: unknown ggml type", expected="a type of GGUF version 3", got=kind, at=at
            )
        if min(dims) < 1 or max(dims) > self.size * 256:
            self._fail(
                f"tensor {name}: impossible shape", expected="dims ≥ 1 that fit the file", got=dims, at=at
            )
        block = FORMATS[format_name]
        if dims[0] % block.elements:
            self._fail(
                f"tensor {name}: rows are not whole {format_name} blocks",
                expected=f"a multiple of {block.elements}",
                got=dims[0],
                at=at,
            )
        if offset % self.alignment:
            self._fail(
                f"tensor {name}: offset is not aligned",
                expected=f"a multiple of {self.alignment}",
                got=offset,
                at=at,
            )
        count = 1
        for d in dims:
            count *= d
        return TensorInfo(name, format_name, tuple(reversed(dims)), offset, block.nbytes(count))

    def _count(self, what: str, most: int, *, least_bytes: int) -> int:
        """A u64 count whose elements take at least `least_bytes` each and so must fit in what is left."""
        at = self._at
        count = self._u64()
        fits = min(most, (self.size - self._at) // least_bytes)
        if count > fits:
            self._fail(f"{what} is impossible", expected=f"≤ {fits}", got=count, at=at)
        return count

    def _string(self, what: str, most: int) -> str:
        at = self._at
        length = self._u64()
        if length > most:
            self._fail(f"{what} is too long", expected=f"≤ {most} bytes", got=length, at=at)
        raw = bytes(self._take(length))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8", got=repr(raw[:32]), at=at)

    def _u32(self) -> int:
        value: int = _U32.unpack(self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._take(8))[0]
        return value

    def _take(self, length: int) -> memoryview:
        start, self._at = self._at, self._at + length
        if self._at > self.size:
            self._fail(
                "file ends inside the header",
                expected=f"{length} bytes more",
                got=self.size - start,
                at=start,
                remedy="the file is truncated: fetch it again",
            )
        return self._view[start : self._at]

    def _fail(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        at: int | None = None,
        remedy: str | None = None,
    ) -> NoReturn:
        where = f"{self._path}" + (f", byte {at}" if at is not None else "")
        raise ModelFileError(what, expected=expected, got=got, where=where, remedy=remedy)
