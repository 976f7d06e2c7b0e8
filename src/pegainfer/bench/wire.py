"""What the parent and its client processes tell each other: msgpack frames over the pipes, never pickle."""

from __future__ import annotations

from typing import BinaryIO

import msgspec

LENGTH_BYTES = 8


class Job(msgspec.Struct, array_like=True, frozen=True):
    """One request to send."""

    index: int  # among all of the run
    at: float  # seconds after the start at which it arrives
    body: bytes  # JSON


class Work(msgspec.Struct, tag="work", frozen=True, kw_only=True):
    """Parent to client, first: all that this process will send."""

    host: str
    port: int
    tls: bool
    verify: bool
    head: bytes  # request line and headers without Content-Length, each with its CRLF
    stream: bool
    jobs: list[Job]
    concurrency: int  # most requests at one time; 0: any number
    timeout: float  # seconds


class Go(msgspec.Struct, tag="go", frozen=True):
    """Parent to client: begin."""

    start: float  # CLOCK_MONOTONIC seconds, later than now


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Client to parent: waits for Go."""


class Progress(msgspec.Struct, tag="progress", frozen=True):
    done: int  # requests that ended since the last message


class Record(msgspec.Struct, array_like=True):
    """What became of one request. Times in seconds; `error` is empty where it succeeded."""

    index: int
    start: float = 0.0  # CLOCK_MONOTONIC when it was written to the socket
    queued: float = 0.0  # from its arrival until it was written
    ttft: float = 0.0  # 0 where the answer was not streamed
    latency: float = 0.0  # until the last token
    itls: list[float] = []
    chunks: int = 0  # events that carried text or a finish
    prompt_tokens: int | None = None  # as the server counted; None: it did not say
    output_tokens: int | None = None
    text: str = ""
    error: str = ""


class Outcome(msgspec.Struct, tag="outcome", frozen=True, kw_only=True):
    """Client to parent, last."""

    records: list[Record]
    cpu_seconds: float
    wall_seconds: float
    lags: list[float]  # seconds by which timers of the event loop came late
    late: list[float]  # seconds by which requests were sent after their time though a place was free


ToClient = Work | Go
ToParent = Ready | Progress | Outcome

_encoder = msgspec.msgpack.Encoder()
_to_client = msgspec.msgpack.Decoder(ToClient)
_to_parent = msgspec.msgpack.Decoder(ToParent)


def send(pipe: BinaryIO, message: ToClient | ToParent) -> None:
    body = _encoder.encode(message)
    pipe.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
    pipe.flush()


def receive_work(pipe: BinaryIO) -> ToClient:
    """Raises EOFError where the parent has gone."""
    message: ToClient = _to_client.decode(_read(pipe))
    return message


def receive_news(pipe: BinaryIO) -> ToParent:
    """Raises EOFError where the client process has ended."""
    message: ToParent = _to_parent.decode(_read(pipe))
    return message


def _read(pipe: BinaryIO) -> bytes:
    header = pipe.read(LENGTH_BYTES)
    length = int.from_bytes(header, "little")
    body = pipe.read(length) if len(header) == LENGTH_BYTES else b""
    if len(header) < LENGTH_BYTES or len(body) < length:
        raise EOFError("the other side of the pipe has gone")
    return body
