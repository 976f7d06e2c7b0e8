"""The engine's end of the socket."""

from __future__ import annotations

import logging
import socket

import pytest

from pegainfer.contract import codec
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.frames import FrameReader
from pegainfer.engine.channel import Writer


def test_a_front_that_hung_up_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, front = socket.socketpair()
    with engine, caplog.at_level(logging.DEBUG):
        front.close()
        writer = Writer(engine)
        writer.put(codec.Events(()))
        writer.close()
    (record,) = [r for r in caplog.records if r.name == "pegainfer.engine.channel"]
    assert record.levelno == logging.DEBUG
    assert "the front cannot be reached" in record.message


def test_a_socket_that_fails_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, front = socket.socketpair()
    with front, caplog.at_level(logging.DEBUG):
        engine.close()
        writer = Writer(engine)
        writer.put(codec.Events(()))
        writer.close()
    (record,) = [r for r in caplog.records if r.name == "pegainfer.engine.channel"]
    assert record.levelno == logging.WARNING


def test_a_step_too_large_for_one_frame_goes_out_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [TokenEvent(request_id=f"r{i}", tokens=tuple(range(20 * i))) for i in range(20)]
    size = len(codec.encode_frame(codec.Events(events)))
    stats = EngineStats(steps=7)
    monkeypatch.setattr(codec, "MAX_FRAME", size // 3)
    engine, front = socket.socketpair()
    with front:
        writer = Writer(engine)
        writer.put(codec.Events(events, stats))
        writer.put(codec.Events([], stats))
        writer.close()
        engine.close()
        stream = b"".join(iter(lambda: front.recv(1 << 16), b""))
    messages = [codec.decode_to_front(body) for body in FrameReader().feed(stream)]
    frames = [m for m in messages if isinstance(m, codec.Events)]
    assert len(frames) > 3
    assert [event for frame in frames for event in frame.events] == events
    # The snapshot counts all of them, so it comes with the last.
    assert [frame.stats for frame in frames[-2:]] == [stats, stats]
    assert not any(frame.stats for frame in frames[:-2])
