"""How a block's bytes get from one engine to another: through a TCP socket, or in memory that both map.

A third way is NIXL's (nixl.py). All kinds listen, connect, send a block and receive one. Over a Unix socket
the reader gets the descriptor of the memory that the block lies in and copies it from there. The sender holds
the block until the reader says that the copy is made, and confirms that; without the confirmation the reader
discards its copy.
"""

from __future__ import annotations

import mmap
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

import numpy as np

from pegainfer.contract.errors import ConfigError
from pegainfer.kv.device.store import Bytes
from pegainfer.peers.channel import Channel, Copied, Follows, PeerError
from pegainfer.peers.config import Address

BACKLOG = 64
FD_MARK = b"f"  # the byte that a descriptor travels with


class SharedMemory:
    """Memory that other processes can map: an `Allocate` of HostStore's slabs."""

    def __init__(self) -> None:
        self._slabs: list[tuple[int, int, int]] = []  # address, bytes, descriptor

    def __call__(self, nbytes: int) -> Bytes:
        """Raises OSError."""
        fd = os.memfd_create("pegainfer-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        except BaseException:
            os.close(fd)
            raise
        self._slabs.append((memory.ctypes.data, nbytes, fd))
        return memory

    def locate(self, content: Bytes) -> tuple[int, int, int] | None:
        """(slab, offset, descriptor) of memory that was allocated here; None for other memory."""
        address = content.ctypes.data
        for slab, (start, nbytes, fd) in enumerate(self._slabs):
            if start <= address and address + content.nbytes <= start + nbytes:
                return slab, address - start, fd
        return None

    def close(self) -> None:
        """Closes the descriptors; the memory lives on for those that have mapped it."""
        for _, _, fd in self._slabs:
            os.close(fd)
        self._slabs = []


class Transport(Protocol):
    """One kind of connection. `receive` and `send` of one channel are called by one thread at a time."""

    def listen(self) -> socket.socket:
        """Raises ConfigError where the address cannot be listened at."""

    def connect(self, seconds: float) -> socket.socket:
        """Raises OSError."""

    def send(self, channel: Channel, content: Bytes) -> None:
        """Sends a block, which is held meanwhile. Raises PeerError."""

    def receive(self, channel: Channel, out: Bytes) -> None:
        """Receives a block. Raises PeerError where it is not one of this size, or was not held."""

    def forget(self, session: str) -> None:
        """A channel was closed."""


class Tcp:
    """Implements Transport."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def listen(self) -> socket.socket:
        at = self._address.host, self._address.port
        try:
            family = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server(at, family=family, backlog=BACKLOG)
        except OSError as error:
            raise _cannot_listen(self._address, error) from None

    def connect(self, seconds: float) -> socket.socket:
        return socket.create_connection((self._address.host, self._address.port), seconds)

    def send(self, channel: Channel, content: Bytes) -> None:
        channel.send(Follows(content.nbytes), content.data)

    def receive(self, channel: Channel, out: Bytes) -> None:
        _check(channel.expect(Follows), out)
        channel.receive_into(out.data)

    def forget(self, session: str) -> None:
        """Nothing is kept."""


class Shared:
    """Implements Transport over a Unix socket; memory that cannot be shared goes through the socket."""

    def __init__(self, address: Address, memory: SharedMemory | None) -> None:
        """`memory`: of the blocks that `send` gets; None on the receiver's side."""
        self._address = address
        self._memory = memory
        self._sent: dict[str, set[int]] = {}  # slabs whose descriptors a session has
        self._mapped: dict[tuple[str, int], Bytes] = {}  # by session and slab

    def listen(self) -> socket.socket:
        self._remove_stale()
        listener = socket.socket(socket.AF_UNIX)
        try:
            old = os.umask(0o177)  # only this user may connect
            try:
                listener.bind(self._address.path)
            finally:
                os.umask(old)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise _cannot_listen(self._address, error) from None
        return listener

    def _remove_stale(self) -> None:
        """Removes the socket of an engine that was killed. Raises ConfigError; other files stay."""
        path = Path(self._address.path)
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(
                    "cannot listen for peers", expected="a socket, or no file yet", got="another file",
                    where=self._address.text, remedy="choose another path",
                )  # fmt: skip
            try:
                self.connect(1.0).close()
            except ConnectionRefusedError:  # no process listens
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _cannot_listen(self._address, error) from None

    def connect(self, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            connection.connect(self._address.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def send(self, channel: Channel, content: Bytes) -> None:
        found = self._memory.locate(content) if self._memory is not None else None
        if found is None:
            channel.send(Follows(content.nbytes), content.data)
            return
        slab, offset, fd = found
        channel.send(Follows(content.nbytes, slab, offset))
        sent = self._sent.setdefault(channel.session, set())
        if slab not in sent:
            try:
                socket.send_fds(channel.socket, [FD_MARK], [fd])
            except OSError as error:
                raise PeerError("the connection to a peer is lost", got=str(error)) from None
            sent.add(slab)
        channel.expect(Copied)
        channel.send(Copied())

    def receive(self, channel: Channel, out: Bytes) -> None:
        follows = channel.expect(Follows)
        _check(follows, out)
        if follows.slab < 0:
            channel.receive_into(out.data)
            return
        place = channel.session, follows.slab
        if place not in self._mapped:
            self._mapped[place] = _map(channel)
        content = self._mapped[place][follows.offset : follows.offset + follows.nbytes]
        if content.nbytes != out.nbytes:
            raise PeerError("a peer's block lies beyond its memory", got=follows.offset)
        np.copyto(out, content)
        channel.send(Copied())
        channel.expect(Copied)

    def forget(self, session: str) -> None:
        """A channel was closed: its mappings go with the last view of them."""
        self._sent.pop(session, None)
        for place in list(self._mapped):
            if place[0] == session:
                del self._mapped[place]


def _map(channel: Channel) -> Bytes:
    """Maps the memory whose descriptor comes next, read-only."""
    try:
        _, fds, _, _ = socket.recv_fds(channel.socket, 1, 1)
    except OSError as error:
        raise PeerError("the connection to a peer is lost", got=str(error)) from None
    if not fds:
        raise PeerError("a peer sent no descriptor of its memory")
    try:
        return np.frombuffer(mmap.mmap(fds[0], 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise PeerError("a peer's memory cannot be mapped", got=str(error)) from None
    finally:
        os.close(fds[0])


def _check(follows: Follows, out: Bytes) -> None:
    if follows.nbytes != out.nbytes:
        raise PeerError("a peer's block has another size", expected=out.nbytes, got=follows.nbytes)


def _cannot_listen(address: Address, error: OSError) -> ConfigError:
    return ConfigError(
        "cannot listen for peers", got=str(error), where=address.text, remedy="choose another --peer-listen"
    )
