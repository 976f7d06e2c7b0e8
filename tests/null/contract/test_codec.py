"""Messages between front and engine, as frames."""

from __future__ import annotations

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import PegaError
from pegainfer.contract.frames import FrameReader

MESSAGES = [codec.Cancel("a"), codec.Cancel("b" * 300, 1), codec.Drain(), codec.Shutdown()]


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 10_000])
def test_messages_come_whole_and_in_order_whatever_the_pieces(size: int) -> None:
    stream = b"".join(codec.encode_frame(m) for m in MESSAGES)
    frames = FrameReader(codec.MAX_FRAME)
    seen: list[codec.ToEngine] = []
    for start in range(0, len(stream), size):
        seen += [codec.decode_to_engine(body) for body in frames.feed(stream[start : start + size])]
    assert seen == MESSAGES


def test_a_message_that_is_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME", 100)
    codec.encode_frame(codec.Cancel("a" * 50))
    with pytest.raises(PegaError, match="message too large"):
        codec.encode_frame(codec.Cancel("a" * 101))
