"""The engine's end of the socket."""

from __future__ import annotations

import logging
import socket

import pytest

from pegainfer.contract import codec
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
