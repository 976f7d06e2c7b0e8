"""One connection between engines: frames of msgpack, and the handshake that both sides begin with.

    client                                     server
    Hello (version, nonce) ──────────────────►
                           ◄────────────────── Welcome (nonce, proof that it knows the secret)
    Proof, digest ───────────────────────────►
                           ◄────────────────── Accepted (session), or Refused (why)

A proof is an HMAC-SHA256 over both nonces. What follows is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
from typing import TypeVar

import msgspec

from pegainfer.contract.errors import PegaError
from pegainfer.contract.peers import Ended, Prefill, Produced, Release
from pegainfer.peers.config import PeerOptions

VERSION = 3  # raised with every change of the protocol
NONCE_BYTES = 16
MAX_FRAME = 64 << 20  # bytes
MAX_GREETING = 4096  # bytes of a frame before the other side has proved itself


class PeerError(PegaError):
    """A peer is lost, refuses, or does not keep to the protocol."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    version: int
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    proof: bytes
    digest: bytes  # see PeerOptions


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    session: str  # of this connection; Fetch names the session whose requests it reads for
    seconds: float  # without a word from the client until the server counts it as lost


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Sent by either side, so that the other one does not count it as lost."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Client to server: send a block that was produced for a request. Answered by the block, or Refused."""

    session: str
    id: str
    group: int
    key: bytes


class Follows(msgspec.Struct, frozen=True, tag="follows"):
    """Server to client: a block's content comes next, or lies in shared memory."""

    nbytes: int
    slab: int = -1  # of shared memory; -1: the content follows
    offset: int = 0  # bytes


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """Client to server: the memory was read. Server to client: it was held until then."""


class Readable(msgspec.Struct, frozen=True, tag="readable"):
    """Server to client: a block's content can be read from this address through NIXL."""

    nbytes: int
    address: int
    metadata: bytes = b""  # of the server's NIXL agent, where it has changed for this connection


Message = (
    Hello
    | Welcome
    | Proof
    | Accepted
    | Refused
    | Ping
    | Fetch
    | Follows
    | Copied
    | Readable
    | Prefill
    | Release
    | Produced
    | Ended
)
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """Frames over a socket. `send` may be called from several threads, `receive` from one."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """`seconds`: longest time that a call waits for the other side."""
        self.socket = connection
        self.session = ""
        # Seconds of silence after which one side counts the other as lost; `greet` lowers it to the server's.
        self.patience = seconds
        self.limit = MAX_FRAME
        self._sending = threading.Lock()
        connection.settimeout(seconds)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, content: memoryview | None = None) -> None:
        """With raw bytes after the frame where `content` is given. Raises PeerError."""
        body = _encoder.encode(message)
        try:
            with self._sending:
                self.socket.sendall(len(body).to_bytes(4, "little") + body)
                if content is not None:
                    self.socket.sendall(content)
        except OSError as error:
            raise PeerError("the connection to a peer is lost", got=str(error)) from None

    def receive(self) -> Message:
        """The next message. Raises PeerError; TimeoutError where nothing of it came in time."""
        length = int.from_bytes(self.receive_bytes(4, idle=True), "little")
        if length > self.limit:
            raise PeerError("a peer's message is too long", expected=f"≤ {self.limit} bytes", got=length)
        try:
            message: Message = _decoder.decode(self.receive_bytes(length))
        except (ValueError, RecursionError) as error:  # msgspec's and Unicode's errors are ValueErrors
            raise PeerError("a peer's message cannot be decoded", got=str(error)) from None
        return message

    def expect(self, kind: type[M]) -> M:
        """The next message, which is of this kind. Raises PeerError."""
        try:
            message = self.receive()
        except TimeoutError:
            raise PeerError("a peer does not answer") from None
        if isinstance(message, Refused):
            raise PeerError("refused by a peer", got=message.reason)
        if not isinstance(message, kind):
            raise PeerError(
                "unexpected message of a peer", expected=kind.__name__, got=type(message).__name__
            )
        return message

    def receive_bytes(self, nbytes: int, *, idle: bool = False) -> bytearray:
        """Raises PeerError; with `idle`, TimeoutError where not one byte came in time."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), idle=idle)
        return data

    def receive_into(self, out: memoryview, *, idle: bool = False) -> None:
        """Fills `out`. Raises as `receive_bytes` does."""
        done = 0
        try:
            while done < len(out):
                got = self.socket.recv_into(out[done:])
                if not got:
                    raise PeerError("a peer has hung up")
                done += got
        except TimeoutError as error:
            if idle and not done:
                raise
            raise PeerError("a peer stopped within a message", got=str(error)) from None
        except OSError as error:
            raise PeerError("the connection to a peer is lost", got=str(error)) from None

    def close(self) -> None:
        """Ends all waits on the connection, in this process and the other."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def greet(channel: Channel, options: PeerOptions) -> None:
    """The client's side of the handshake. Raises PeerError."""
    channel.limit = MAX_GREETING
    mine = secrets.token_bytes(NONCE_BYTES)
    channel.send(Hello(VERSION, mine))
    welcome = channel.expect(Welcome)
    if not hmac.compare_digest(welcome.proof, _proof(options, b"server", mine, welcome.nonce)):
        raise PeerError("a prefill peer does not know the secret")
    channel.send(Proof(_proof(options, b"client", mine, welcome.nonce), options.digest))
    accepted = channel.expect(Accepted)
    if not accepted.seconds > 0:
        raise PeerError("a prefill peer waits for no message", expected="seconds > 0", got=accepted.seconds)
    channel.session = accepted.session
    channel.patience = min(options.seconds, accepted.seconds)
    channel.limit = MAX_FRAME


def admit(channel: Channel, options: PeerOptions) -> None:
    """The server's side of the handshake. Raises PeerError; the client then knows why."""
    channel.limit = MAX_GREETING
    hello = channel.expect(Hello)
    mine = secrets.token_bytes(NONCE_BYTES)
    if hello.version != VERSION:
        _refuse(channel, f"expected protocol version {VERSION}, got {hello.version}")
    channel.send(Welcome(mine, _proof(options, b"server", hello.nonce, mine)))
    proof = channel.expect(Proof)
    if not hmac.compare_digest(proof.proof, _proof(options, b"client", hello.nonce, mine)):
        _refuse(channel, "the secrets differ")
    if proof.digest != options.digest:
        _refuse(
            channel, "the model, its formats, the device, the version of pegainfer or the use of NIXL differ"
        )
    channel.session = secrets.token_hex(NONCE_BYTES)
    channel.send(Accepted(channel.session, options.seconds))
    channel.limit = MAX_FRAME


def _refuse(channel: Channel, reason: str) -> None:
    channel.send(Refused(reason))
    raise PeerError("a peer was refused", got=reason)


def _proof(options: PeerOptions, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(options.secret, side + client_nonce + server_nonce, "sha256")
