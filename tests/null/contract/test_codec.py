"""Frames between front and engine: whole messages out of a stream that comes in any pieces."""

from __future__ import annotations

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import PegaError

MESSAGES = [codec.Cancel("a"), codec.Cancel("b" * 300, 1), codec.Drain(), codec.Shutdown()]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 64, 10_000])
def test_frames_come_whole_and_in_order_whatever_the_pieces(size: int) -> None:
    stream = b"".join(codec.encode_frame(m) for m in MESSAGES)
    frames = codec.FrameReader()
    seen: list[codec.ToEngine] = []
    for start in range(0, len(stream), size):
        seen += [codec.decode_to_engine(body) for body in frames.feed(stream[start : start + size])]
    assert seen == MESSAGES


def test_a_frame_that_is_too_long_is_refused_after_those_before_it() -> None:
    frames = codec.FrameReader()
    feed = frames.feed(codec.encode_frame(codec.Drain()) + (codec.MAX_FRAME + 1).to_bytes(4, "little"))
    assert codec.decode_to_engine(next(feed)) == codec.Drain()
    with pytest.raises(PegaError, match="frame too large"):
        next(feed)
