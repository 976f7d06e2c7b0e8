"""Frames, by which processes send each other messages: 8 bytes of length (little-endian), then the body."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pegainfer.contract.errors import PegaError

HEADER_BYTES = 8


def frame_of(body: bytes) -> bytes:
    """The body with its length before it."""
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def body_length(header: bytes | bytearray, most: int | None = None) -> int:
    """Length in bytes of the body that follows a header.

    Args:
        most: bytes that a body may have; None: any number.

    Raises PegaError for a longer body.
    """
    length = int.from_bytes(header, "little")
    if most is not None and length > most:
        raise PegaError("frame too large", expected=f"≤ {most} bytes", got=length)
    return length


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """The next frame's body, from a peer that is trusted with its length.

    Args:
        read: returns at most so many bytes of the stream, and none at its end.

    Raises EOFError where the stream ends.
    """
    return _read_all(read, body_length(_read_all(read, HEADER_BYTES)))


def _read_all(read: Callable[[int], bytes], count: int) -> bytes:
    part = read(count)
    if len(part) == count:
        return part
    out = bytearray(part)
    while len(out) < count:
        if not part:
            raise EOFError(f"the stream ended after {len(out)} of {count} bytes")
        part = read(count - len(out))
        out += part
    return bytes(out)


class FrameReader:
    """Cuts a stream of bytes, in whatever pieces it comes, into the bodies of its frames."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: bytes that a body may have; None: any number."""
        self._most = most
        self._buffer = bytearray()  # a frame that has come in part

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole with these bytes. Raises PegaError for one that is too long."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                end = body + body_length(buffer[start:body], self._most)
                if end > len(buffer):
                    break
                start = end
                yield bytes(buffer[body:end])
        finally:
            del buffer[:start]
