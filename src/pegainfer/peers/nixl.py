"""Transfers blocks through NIXL, which reads the memory of another process or machine, by RDMA if possible.

The handshake and all messages go over TCP; only a block's content goes through NIXL. The reader posts a READ
into a buffer of its own, because a READ that ends after its deadline must not write into a reused block.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.store import Bytes, reserve
from pegainfer.peers.channel import Channel, Copied, PeerError, Readable
from pegainfer.peers.transport import Tcp

if TYPE_CHECKING:
    from pegainfer.peers.config import Address

log = logging.getLogger(__name__)

POLL_SECONDS = 50e-6
MEMORY = "DRAM"


class Nixl:
    """Implements Transport. One NIXL agent serves all connections of an address."""

    def __init__(self, address: Address) -> None:
        """Raises ConfigError where NIXL is not installed, or has no backend that works here."""
        self._tcp = Tcp(address)
        self._agent = _agent(address)
        self._lock = threading.Lock()  # of the agent and of what follows
        self._registered: dict[
            int, Bytes
        ] = {}  # by address; kept alive, so that no other object gets this memory
        self._told: dict[
            str, int
        ] = {}  # session -> number of registrations in the metadata sent to its reader
        self._names: dict[str, str] = {}  # session -> the sender's agent
        self._spare: list[Bytes] = []  # registered buffers that no READ writes to

    def listen(self) -> socket.socket:
        return self._tcp.listen()

    def connect(self, seconds: float) -> socket.socket:
        return self._tcp.connect(seconds)

    def send(self, channel: Channel, content: Bytes) -> None:
        with self._lock:
            self._register(content)
            news = self._told.get(channel.session) != len(self._registered)
            metadata = self._agent.get_agent_metadata() if news else b""
            self._told[channel.session] = len(self._registered)
        channel.send(Readable(content.nbytes, content.ctypes.data, metadata))
        channel.expect(Copied)
        channel.send(Copied())

    def receive(self, channel: Channel, out: Bytes) -> None:
        at = channel.expect(Readable)
        if at.nbytes != out.nbytes:
            raise PeerError("a peer's block has another size", expected=out.nbytes, got=at.nbytes)
        with self._lock:
            if at.metadata:
                self._names[channel.session] = self._add(at.metadata)
            if channel.session not in self._names:
                raise PeerError("a peer's memory is unknown", expected="NIXL metadata first")
            name = self._names[channel.session]
            fitting = [i for i, memory in enumerate(self._spare) if memory.nbytes == out.nbytes]
            memory = self._spare.pop(fitting[0]) if fitting else reserve(out.nbytes)
            self._register(memory)
        self._read(name, at.address, memory, channel.socket.gettimeout() or 0.0)
        np.copyto(out, memory)
        with self._lock:
            self._spare.append(memory)
        channel.send(Copied())
        channel.expect(Copied)

    def forget(self, session: str) -> None:
        with self._lock:
            self._told.pop(session, None)
            name = self._names.pop(session, None)
            if name is not None and name not in self._names.values():
                with contextlib.suppress(Exception):
                    self._agent.remove_remote_agent(name)

    def _register(self, content: Bytes) -> None:
        """Registers the whole memory that `content` lies in, once. The lock is held."""
        whole = content
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        place = whole.ctypes.data
        if place not in self._registered:
            try:
                self._agent.register_memory([(place, whole.nbytes, 0, "")], MEMORY)
            except Exception as error:  # NIXL's errors have no common class
                raise PeerError("NIXL cannot register memory", got=str(error)) from None
            self._registered[place] = whole

    def _add(self, metadata: bytes) -> str:
        """Makes a sender's memory known to the agent; the sender's name. The lock is held."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PeerError("a peer's NIXL metadata is refused", got=str(error)) from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def _read(self, name: str, address: int, memory: Bytes, seconds: float) -> None:
        """Fills `memory`. Raises PeerError; `memory` then becomes spare only if the READ has ended."""
        deadline = time.monotonic() + seconds
        agent, posted = self._agent, False
        try:
            with self._lock:
                here = agent.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], MEMORY)
                there = agent.get_xfer_descs([(address, memory.nbytes, 0)], MEMORY)
                handle = agent.initialize_xfer("READ", here, there, name)
                posted = True
                state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                with self._lock:
                    state = agent.check_xfer_state(handle)
            with self._lock:
                agent.release_xfer_handle(handle)  # raises where the READ can neither end nor be ended
                if state != "DONE":
                    self._spare.append(memory)
        except Exception as error:
            if not posted:
                with self._lock:
                    self._spare.append(memory)
            raise PeerError("a peer's block cannot be read by NIXL", got=str(error)) from None
        if state != "DONE":
            raise PeerError("a peer's block cannot be read by NIXL", expected="DONE", got=state)


def _agent(address: Address) -> Any:
    """An agent with NIXL's UCX backend. Raises ConfigError."""
    try:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError:
            from nixl_cu13._api import nixl_agent, nixl_agent_config
    except ImportError:
        raise ConfigError(
            "peers over NIXL need its library", got="it is not installed", where=address.text,
            remedy="pip install 'pegainfer[nixl]'",
        ) from None  # fmt: skip
    try:
        return nixl_agent(f"pegainfer-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))
    except Exception as error:
        raise ConfigError("NIXL does not work here", got=str(error), where=address.text) from None
