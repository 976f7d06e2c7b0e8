"""Frames: bodies of any length out of a stream that comes in pieces, is cut off or lies about a length."""

from __future__ import annotations

import io
import random

import pytest

from pegainfer.contract.errors import PegaError
from pegainfer.contract.frames import HEADER_BYTES, FrameReader, body_length, frame_of, read_frame

BODIES = [b"", b"a", b"bc" * 500, b"", b"last"]


def test_the_header_is_the_length_in_little_endian() -> None:
    assert frame_of(b"x" * 258) == b"\x02\x01\0\0\0\0\0\0" + b"x" * 258
    assert body_length(b"\0\0\0\0\x01\0\0\0") == 1 << 32


def test_bodies_come_whole_and_in_order_whatever_the_pieces() -> None:
    stream = b"".join(map(frame_of, BODIES))
    cuts = random.Random(5)
    for _ in range(50):
        frames, seen, start = FrameReader(), list[bytes](), 0
        while start < len(stream):
            stop = start + cuts.choice((1, 7, 8, 9, 300))
            seen += frames.feed(stream[start:stop])
            start = stop
        assert seen == BODIES


def test_a_body_beyond_the_limit_is_refused_after_those_before_it() -> None:
    feed = FrameReader(100).feed(frame_of(b"a" * 100) + frame_of(b"b" * 101))
    assert next(feed) == b"a" * 100
    with pytest.raises(PegaError, match="frame too large; expected ≤ 100 bytes; got 101"):
        next(feed)


@pytest.mark.parametrize("most", [1, 3, 10_000])
def test_frames_are_read_by_pieces(most: int) -> None:
    stream = io.BytesIO(b"".join(map(frame_of, BODIES)))

    def read(count: int) -> bytes:
        return stream.read(min(count, most))

    assert [read_frame(read) for _ in BODIES] == BODIES
    with pytest.raises(EOFError):
        read_frame(read)


@pytest.mark.parametrize("kept", [1, HEADER_BYTES, HEADER_BYTES + 2])
def test_a_stream_that_ends_inside_a_frame(kept: int) -> None:
    with pytest.raises(EOFError, match="of "):
        read_frame(io.BytesIO(frame_of(b"four")[:kept]).read)
