"""Blocks through NIXL between two agents of this process, and what may go wrong."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.store import Bytes, HostStore
from pegainfer.peers.channel import Channel, PeerError, Readable
from pegainfer.peers.config import PeerOptions, parse_address
from pegainfer.peers.decode import DecodeSide
from pegainfer.peers.nixl import Nixl
from pegainfer.peers.prefill import PrefillSide
from pegainfer.peers.transports import transport_of
from tests.support.nixl import needs_nixl

SECONDS = 10.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self,sysv,posix,cma")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


def make() -> Nixl:
    needs_nixl()
    transport = transport_of(parse_address("nixl:127.0.0.1:0", "test"))
    assert isinstance(transport, Nixl)
    return transport


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    pair = [Channel(side, SECONDS) for side in socket.socketpair()]
    pair[0].session = pair[1].session = "s"
    yield pair[0], pair[1]
    for channel in pair:
        channel.close()


def test_blocks_arrive_whole_from_memory_that_is_registered_once(channels: tuple[Channel, Channel]) -> None:
    sender, reader = make(), make()
    slab = np.random.default_rng(3).integers(0, 256, 40 * 1000, np.uint8)
    blocks = [slab[i * 1000 : (i + 1) * 1000] for i in range(40)]
    order = np.random.default_rng(4).permutation(40)

    def send() -> None:
        for i in order:
            sender.send(channels[0], blocks[i])

    thread = threading.Thread(target=send)
    thread.start()
    for i in order:
        out = np.zeros(1000, np.uint8)
        reader.receive(channels[1], out)
        assert (out == blocks[i]).all()
    thread.join()
    assert list(sender._registered) == [slab.ctypes.data]
    assert len(reader._registered) == 1  # one landing buffer serves all
    sender.forget("s")
    reader.forget("s")
    assert not reader._names and not sender._told


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (Readable(1000, 0, b"garbage"), "metadata is refused"),
        (Readable(1000, 0), "memory is unknown"),
        (Readable(999, 0, b"x"), "another size; expected 1000; got 999"),
    ],
)
def test_a_sender_that_makes_no_sense_is_a_peer_error(
    channels: tuple[Channel, Channel], message: Readable, match: str
) -> None:
    channels[0].send(message)
    with pytest.raises(PeerError, match=match):
        make().receive(channels[1], np.zeros(1000, np.uint8))


def test_an_address_that_the_sender_has_not_registered_is_not_read(
    channels: tuple[Channel, Channel],
) -> None:
    sender, reader = make(), make()
    block = np.ones(1000, np.uint8)
    sender._register(block)
    metadata = sender._agent.get_agent_metadata()
    channels[0].send(Readable(1000, block.ctypes.data + (1 << 30), metadata))
    with pytest.raises(PeerError, match="cannot be read by NIXL"):
        reader.receive(channels[1], np.zeros(1000, np.uint8))


@pytest.mark.parametrize(("listens", "connects"), [("nixl:", ""), ("", "nixl:")])
def test_an_engine_that_does_not_use_nixl_is_refused_by_one_that_does(
    listens: str, connects: str, caplog: pytest.LogCaptureFixture
) -> None:
    needs_nixl()
    options = PeerOptions(bytes(32), b"", SECONDS)
    store = HostStore([64], [2])
    prefill = PrefillSide(parse_address(f"{listens}127.0.0.1:0", "test"), options, store)
    decode = DecodeSide([parse_address(f"{connects}127.0.0.1:{prefill.port}", "test")], options)
    prefill.start(lambda message: None)
    decode.start(lambda message: None)
    deadline = time.monotonic() + SECONDS
    while "use of NIXL differ" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    connected = decode.stats()[0].connected
    decode.close()
    prefill.close()
    store.close()
    assert "use of NIXL differ" in caplog.text
    assert not connected


class Agent:
    """An agent whose READs stay in a state, and can be ended or not."""

    def __init__(self, state: str, *, ends: bool) -> None:
        self._state = state
        self._ends = ends

    def register_memory(self, *args: object) -> None: ...

    def get_xfer_descs(self, *args: object) -> object:
        return None

    def initialize_xfer(self, *args: object) -> object:
        return None

    def transfer(self, handle: object) -> str:
        return "PROC"

    def check_xfer_state(self, handle: object) -> str:
        return self._state

    def release_xfer_handle(self, handle: object) -> None:
        if not self._ends:
            raise RuntimeError("still in progress")


@pytest.mark.parametrize(
    ("state", "ends", "spare"), [("PROC", False, 0), ("PROC", True, 1), ("ERR", True, 1)]
)
def test_memory_that_a_read_may_still_write_to_is_not_used_again(
    state: str, ends: bool, spare: int, channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = make()
    monkeypatch.setattr(reader, "_agent", Agent(state, ends=ends))
    reader._names["s"] = "sender"
    channels[1].socket.settimeout(0.05)
    channels[0].send(Readable(1000, 4096))
    out: Bytes = np.zeros(1000, np.uint8)
    with pytest.raises(PeerError, match="cannot be read by NIXL"):
        reader.receive(channels[1], out)
    assert len(reader._spare) == spare


def test_memory_of_a_read_that_was_never_posted_is_used_again(
    channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each peer that is gone would cost a block of registered memory."""

    class Refusing(Agent):
        def initialize_xfer(self, *args: object) -> object:
            raise RuntimeError("not found")

    monkeypatch.setattr("pegainfer.peers.nixl._agent", lambda address: Refusing("DONE", ends=True))
    reader = make()
    reader._names["s"] = "sender"
    for _ in range(3):
        channels[0].send(Readable(1000, 4096))
        with pytest.raises(PeerError, match="cannot be read by NIXL; got not found"):
            reader.receive(channels[1], np.zeros(1000, np.uint8))
    assert len(reader._spare) == len(reader._registered) == 1


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api", "nixl_cu13", "nixl_cu13._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'pegainfer\[nixl\]'"):
        transport_of(parse_address("nixl:127.0.0.1:0", "test"))
