"""Connections between engines where one side waits less, is short of descriptors, or finds another file."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.peers import PeerBlock, Prefill, Produced, Release
from pegainfer.kv.device.store import HostStore
from pegainfer.peers.channel import Channel, PeerError
from pegainfer.peers.config import PeerOptions, parse_address
from pegainfer.peers.decode import DecodeSide
from pegainfer.peers.prefill import PrefillSide
from pegainfer.peers.transport import Shared

DIGEST = bytes(32)
KEY = bytes(range(32))
LOCAL = parse_address("127.0.0.1:0", "test")


def wait_until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


class Sides:
    """Both sides of one connection, and what each engine hears."""

    def __init__(self, prefill_seconds: float, decode_seconds: float) -> None:
        self.store = HostStore([64], [2])
        self.prefill = PrefillSide(LOCAL, PeerOptions(DIGEST, b"", prefill_seconds), self.store)
        address = parse_address(f"127.0.0.1:{self.prefill.port}", "test")
        self.decode = DecodeSide([address], PeerOptions(DIGEST, b"", decode_seconds))
        self.asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.offered: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def start(self) -> None:
        self.prefill.start(self.asked.put)
        self.decode.start(self.offered.put)

    def check_block(self) -> None:
        """A block that the prefill engine offers is read, and released."""
        wait_until(lambda: self.decode.stats()[0].connected)
        self.decode.send(Prefill("1", b"\0\0\0\0"))
        asked = self.asked.get(timeout=30)
        self.store.write(0, 1, KEY, lambda out: out.fill(7))
        self.prefill.send(Produced(asked.id, (PeerBlock(0, KEY, 1),)))
        assert self.offered.get(timeout=30).blocks[0].key == KEY
        out = np.zeros(64, np.uint8)
        self.decode.read(0, KEY, out)
        assert (out == 7).all()
        self.decode.send(Release("1"))
        assert self.asked.get(timeout=30) == Release(asked.id)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()
        self.store.close()


@pytest.fixture
def sides() -> Iterator[Callable[[float, float], Sides]]:
    made: list[Sides] = []

    def make(prefill_seconds: float, decode_seconds: float) -> Sides:
        made.append(Sides(prefill_seconds, decode_seconds))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def test_a_decode_engine_that_is_more_patient_speaks_often_enough(
    sides: Callable[[float, float], Sides], caplog: pytest.LogCaptureFixture
) -> None:
    pair = sides(0.8, 60.0)
    pair.start()
    wait_until(lambda: pair.decode.stats()[0].connected)
    pair.decode.send(Prefill("0", b"\0\0\0\0"))
    assert isinstance(pair.asked.get(timeout=30), Prefill)
    with pytest.raises(queue.Empty):  # a lost connection would release the request
        pair.asked.get(timeout=2.0)
    assert pair.decode.stats()[0].connected and "has ended" not in caplog.text


def test_a_connection_that_could_not_be_taken_does_not_keep_later_ones_out(
    sides: Callable[[float, float], Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = sides(10.0, 10.0)
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def short_of_descriptors(listener: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", short_of_descriptors)
    pair.start()
    pair.check_block()
    assert not failures


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa4type\xa7refused\xa6reason\xa2\xff\xfe",  # no UTF-8
        b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 2000,  # nested too deeply
        b"\xc1",
        b"",
    ],
)
def test_a_message_that_cannot_be_decoded_ends_the_connection_alone(body: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(len(body).to_bytes(4, "little") + body)
        with pytest.raises(PeerError, match="cannot be decoded"):
            Channel(near, 5.0).receive()


def test_a_file_at_the_socket_s_path_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "kv.sock"
    file.write_text("notes")
    with pytest.raises(ConfigError, match="cannot listen for peers"):
        Shared(parse_address(f"unix:{file}", "test"), None).listen()
    assert file.read_text() == "notes"


def test_a_socket_that_nobody_listens_at_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    shared = Shared(parse_address(f"unix:{tmp_path / 'kv.sock'}", "test"), None)
    shared.listen().close()
    with shared.listen() as live:
        with pytest.raises(ConfigError, match="cannot listen for peers"):
            shared.listen()
        shared.connect(5.0).close()
        assert live.accept()


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad path of a Unix socket"):
        parse_address(f"unix:{tmp_path / ('x' * 200)}", "test")
