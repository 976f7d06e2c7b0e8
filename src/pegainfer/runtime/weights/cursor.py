"""Bounded little-endian reads from a buffer: nothing is allocated on a count's or a length's word alone."""

from __future__ import annotations

import struct
from typing import NoReturn

from pegainfer.contract.errors import ModelFileError

_U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Cursor:
    """A place in a buffer that only moves forward. Every method raises ModelFileError."""

    def __init__(self, view: memoryview, where: str) -> None:
        """`where` names the file in messages."""
        self.view = view
        self.size = len(view)
        self.at = 0
        self.where = where

    def take(self, length: int) -> memoryview:
        start, stop = self.at, self.at + length
        if stop > self.size:
            self.fail(
                "file ends inside its header",
                expected=f"{length} bytes more",
                got=self.size - start,
                remedy="the file is truncated: fetch it again",
            )
        self.at = stop
        return self.view[start:stop]

    def u32(self) -> int:
        value: int = _U32.unpack(self.take(4))[0]
        return value

    def u64(self) -> int:
        value: int = U64.unpack(self.take(8))[0]
        return value

    def count(self, what: str, most: int, *, least_bytes: int) -> int:
        """A u64 count of items that take at least `least_bytes` each and so must fit in what is left."""
        at = self.at
        value = self.u64()
        fits = min(most, (self.size - self.at) // least_bytes)
        if value > fits:
            remedy = "the file is truncated or damaged: fetch it again"
            self.fail(f"{what} is impossible", expected=f"≤ {fits}", got=value, at=at, remedy=remedy)
        return value

    def string(self, what: str, most: int) -> str:
        """A u64 length of at most `most` bytes, then UTF-8."""
        at = self.at
        length = self.u64()
        if length > most:
            self.fail(f"{what} is too long", expected=f"≤ {most} bytes", got=length, at=at)
        raw = bytes(self.take(length))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8", got=repr(raw[:32]), at=at)

    def skip_strings(self, what: str, count: int) -> memoryview:
        """Steps over `count` strings and returns their span; only their lengths are read."""
        view, size, length = self.view, self.size, U64.unpack_from
        start = at = self.at
        try:
            for _ in range(count):
                at += 8 + length(view, at)[0]
        except (struct.error, OverflowError):  # the length itself would lie past the end
            at = size + 1
        if at > size:
            self.fail(
                f"{what}: strings end past the file",
                expected=f"{count} strings within {size} bytes",
                at=start,
                remedy="the file is truncated or damaged: fetch it again",
            )
        self.at = at
        return view[start:at]

    def fail(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        at: int | None = None,
        remedy: str | None = None,
    ) -> NoReturn:
        where = f"{self.where}, byte {self.at if at is None else at}"
        raise ModelFileError(what, expected=expected, got=got, where=where, remedy=remedy)
