"""Addresses, secrets and messages of peers that are wrong, on sockets without an engine."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from pegainfer.app.config import EngineConfig
from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.store import BlockStore
from pegainfer.peers.channel import Channel, PeerError, greet
from pegainfer.peers.config import PeerOptions, parse_address, read_secret
from pegainfer.peers.peer import Peer
from pegainfer.peers.prefill import PrefillSide
from pegainfer.peers.transports import transport_of

OPTIONS = PeerOptions(digest=bytes(32), secret=b"", seconds=5.0)
NO_UTF8 = b"\x81\xa4type\xa2\xff\xfe"  # {"type": "<no UTF-8>"} in msgpack


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "text",
    [
        "", ":80", "host", "host:", "host:-1", "host:65536", "host:" + "9" * 5000, "[]:80", "a..b:80",
        "x" * 64 + ":80", "ho\0st:80", "unix:", "unix:/a\0b", "unix:/" + "x" * 107,
        "unix:~no-such-user/kv.sock", "nixl:", "nixl:host", "nixl:nixl:host:80", "http://host:80", "ho st:80",
        "host/path:80", "*:80", "[::1:80", "host:٣", "user@host:80",
    ],
)  # fmt: skip
def test_a_wrong_address_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bad (address of a peer|path of a Unix socket).*at peer_listen"):
        parse_address(text, "peer_listen")


def test_the_longest_path_can_be_listened_at(tmp_path: Path) -> None:
    name = "x" * (107 - len(str(tmp_path)) - 1)
    transport_of(parse_address(f"unix:{tmp_path}/{name}", "peer_listen")).listen().close()


def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match="expected a socket, or no file yet"):
            transport_of(parse_address(f"unix:{path}", "peer_listen")).listen()
    assert file.read_text() == "mine"


def test_the_socket_of_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    transport = transport_of(parse_address(f"unix:{tmp_path}/kv.sock", "peer_listen"))
    transport.listen().close()
    with contextlib.closing(transport.listen()), pytest.raises(ConfigError, match="cannot listen for peers"):
        transport.listen()


def test_a_path_below_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "kv.sock", tmp_path / "none" / "kv.sock"):
        with pytest.raises(ConfigError, match="cannot listen for peers"):
            transport_of(parse_address(f"unix:{path}", "peer_listen")).listen()


@pytest.mark.parametrize("path", ["/no/such/file", "/", "a\0b", "~no-such-user/secret"])
def test_a_secret_that_cannot_be_read_is_a_config_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the peers' secret.*at peer_secret_file"):
        read_secret(path, [])


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e12, float("inf"), float("nan")])
def test_a_timeout_that_sockets_refuse_is_a_config_error(seconds: float) -> None:
    with pytest.raises(ConfigError, match="bad peer_timeout"):
        EngineConfig(peer_timeout=seconds)


@pytest.mark.parametrize("body", [b"", b"\xc1", NO_UTF8, b"\x91" * 4000, b"\x80"])
def test_a_message_that_makes_no_sense_is_a_peer_error(body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(frame(body))
        with pytest.raises(PeerError, match="cannot be decoded"):
            Channel(ours, 5.0).receive()


@pytest.fixture
def prefill() -> Iterator[PrefillSide]:
    """A prefill side whose store is never read."""
    side = PrefillSide(parse_address("127.0.0.1:0", "peer_listen"), OPTIONS, cast(BlockStore, None))
    yield side
    side.close()


def is_greeted(side: PrefillSide) -> bool:
    with socket.create_connection(("127.0.0.1", side.port), 5.0) as connection:
        channel = Channel(connection, 5.0)
        greet(channel, OPTIONS)
        return bool(channel.session)


def test_a_prefill_engine_goes_on_after_garbage(prefill: PrefillSide) -> None:
    prefill.start(lambda message: None)
    with socket.create_connection(("127.0.0.1", prefill.port), 5.0) as connection:
        connection.sendall(frame(NO_UTF8))
        assert connection.recv(1) == b""
    assert is_greeted(prefill)


def test_a_prefill_engine_accepts_again_after_a_lack_of_descriptors(prefill: PrefillSide) -> None:
    listener: Any = prefill._listener

    class FailsOnce:
        fails = 1

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            if self.fails:
                self.fails -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

    prefill._listener = cast(socket.socket, FailsOnce())
    prefill.start(lambda message: None)
    assert is_greeted(prefill)


def test_a_decode_engine_connects_again_after_garbage() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        address = parse_address(f"127.0.0.1:{listener.getsockname()[1]}", "prefill_peers")
        peer = Peer(address, OPTIONS, lambda peer, message: None)
        peer.start()
        try:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(frame(NO_UTF8))
        finally:
            peer.close()
