"""What the parent and its client processes tell each other: frames of msgpack over pipes, never pickle."""

from __future__ import annotations

import os
import select
from functools import partial

import msgspec

from pegainfer.contract.frames import frame_of, read_frame

READ_BYTES = 1 << 20  # most bytes taken from a pipe at once


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


def send(pipe: int, message: ToClient | ToParent) -> None:
    """Writes a frame to a file descriptor. Raises BrokenPipeError where nobody reads any more."""
    data = memoryview(frame_of(_encoder.encode(message)))
    while data:
        try:
            data = data[os.write(pipe, data) :]
        except BlockingIOError:
            select.select([], [pipe], [])


def receive_work(pipe: int) -> ToClient:
    """Raises EOFError where the parent has gone."""
    message: ToClient = _to_client.decode(read_frame(partial(_read, pipe)))
    return message


def receive_news(pipe: int) -> ToParent:
    """Raises EOFError where the client process has ended."""
    message: ToParent = _to_parent.decode(read_frame(partial(_read, pipe)))
    return message


def _read(pipe: int, count: int) -> bytes:
    """What the pipe has, at most `count` bytes; waits for something. Nothing at the pipe's end."""
    while True:
        try:
            return os.read(pipe, min(count, READ_BYTES))
        except BlockingIOError:
            select.select([pipe], [], [])
