"""Messages between the engine's process and that of a rank: frames over a socket pair."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.frames import FrameReader, frame_of
from pegainfer.contract.step import StepPlan, StepResult

READ_BYTES = 1 << 18


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Samples the forward pass before it; answered with Stepped or Failure."""

    masks: dict[int, bytes] | None


class ReadAdapter(msgspec.Struct, frozen=True, tag="read_adapter"):
    """Reads a LoRA adapter and keeps it under the number of this call; answered with Answered."""

    call: int
    name: str
    path: str


class InstallAdapter(msgspec.Struct, frozen=True, tag="install_adapter"):
    """Installs an adapter that an earlier call has read; answered with Answered."""

    call: int
    index: int
    adapter: int  # the call that read it


class RemoveAdapter(msgspec.Struct, frozen=True, tag="remove_adapter"):
    """Frees an adapter's slot; answered with Answered."""

    call: int
    index: int


class ForgetAdapter(msgspec.Struct, frozen=True, tag="forget_adapter"):
    """Drops an adapter that was read under this call's number; not answered."""

    adapter: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has loaded its part of the model."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    result: StepResult


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """What contract.errors.restored_error needs. Before Ready: the rank cannot start."""

    kind: str
    message: str


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """A call about adapters has ended; with `failure` it had no effect."""

    call: int
    info: AdapterInfo | None = None  # of one that was read
    failure: Failure | None = None


AdapterCall = ReadAdapter | InstallAdapter | RemoveAdapter
ToRank = Forward | Sample | AdapterCall | ForgetAdapter
FromRank = Ready | Stepped | Failure | Answered
M = TypeVar("M")


class Channel(Generic[M]):
    """One end. Threads may send while another receives.

    Args:
        sock: taken over.
        incoming: the union of the messages that the other end sends.
    """

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        self._sock = sock
        # Reentrant, because a finaliser that sends (rank_adapters.py) may run on a thread that is sending.
        self._sending = threading.RLock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(incoming)

    def limit_sends(self, seconds: float) -> None:
        """A send that the other end does not take within this time raises OSError."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError where the other end is gone."""
        with self._sending:
            self._sock.sendall(frame_of(self._encoder.encode(message)))

    def receive(self) -> Iterator[M]:
        """Messages until the other end closes, in whatever way."""
        frames = FrameReader()
        try:
            while data := self._sock.recv(READ_BYTES):
                for body in frames.feed(data):
                    yield self._decoder.decode(body)
        except OSError:
            return

    def hang_up(self) -> None:
        """Lets the other end know that nothing more comes, and ends `receive` here."""
        with contextlib.suppress(OSError):  # the other end was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
