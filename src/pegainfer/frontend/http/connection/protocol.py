"""uvicorn's HTTP/1.1 protocol with what it lacks.

Bounds: on a header's size and time, on trailers, on requests sent ahead of their answers, on answers that are
not fetched. Answers without a length in HTTP/1.0, which knows no chunks. The bodies of requests that ask for
another protocol, as Java's client and curl do by themselves: the parser takes them for that protocol's bytes.

uvicorn has no options for these, so parts that it does not document are overridden. Its version is pinned
exactly for that reason, and tests/null/frontend/http/connection/test_uvicorn_parts.py names every part.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pegainfer.frontend.http.answer.responses import encode, send_error
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError

MAX_PIPELINED = 64  # requests of one connection that wait for the answers before theirs
READ_AHEAD = 2  # of them are read with the connection open to more: whoever hangs up then is noticed
UNKNOWN_LENGTH = 1 << 62


def bounded_protocol(
    config: HttpConfig, on_refused: Callable[[int, str, str], None]
) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn's `http` option, with this configuration's limits.

    Args:
        on_refused: called with status, client and reason for what never becomes a request.
    """

    class Configured(BoundedProtocol):
        limits = config

        def _tell_refused(self, status: int, message: str) -> None:
            on_refused(status, self.client[0] if self.client else "", message)

    return Configured


class BoundedProtocol(HttpToolsProtocol):
    """One connection, on the event loop; uvicorn makes it, so that its limits come with its class."""

    limits: HttpConfig

    def _tell_refused(self, status: int, message: str) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answering: RequestResponseCycle | None = None  # the newest whose application was started
        self._deaf = False  # what follows a broken request is not looked at
        self._in_header = False
        self._repeating = False  # a header that was read before is told to a new parser
        self._header_bytes = 0  # of an unfinished header, its first read not counted
        self._header_timer: asyncio.TimerHandle | None = None
        self._flush: _FlushWatch | None = None  # from the connection's beginning

    # What the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._flush = _FlushWatch(self.loop, transport, self.limits.write_seconds)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._flush is not None:
            self._flush.end()
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:  # uvicorn tells the last of those sent ahead
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        began_before = self._in_header
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", "not an HTTP/1.1 request")
        if began_before and self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large", _too_large(self.limits))
        self._arm()  # after blank lines, or the rest of a body that nobody waits for, a request must follow

    def _feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._read_on()

    def _read_on(self) -> None:
        """A new parser, told of the framing of the request whose header the old one has read."""
        framing = [h for h in self.headers if h[0] in (b"content-length", b"transfer-encoding")]
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in framing), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._repeating = True
        self.parser.feed_data(b"\r\n".join(lines))
        self._repeating = False

    # What the parser tells

    def on_message_begin(self) -> None:
        if self._repeating:
            return
        super().on_message_begin()
        self._in_header = True
        self._header_bytes = 0
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:
            super().on_header(name, value)
        # A trailer, which nothing here reads, is forgotten.

    def on_headers_complete(self) -> None:
        if self._repeating:
            return
        self._in_header = False
        self._disarm()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.close()
        if self.transport.is_closing():
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        app = self.app
        if size > self.limits.max_header_bytes:
            self.app = self._answer_too_large
        super().on_headers_complete()
        self.app = app
        if 0 < len(self.pipeline) <= READ_AHEAD:
            self.flow.resume_reading()  # which uvicorn has paused
        if self.parser.get_http_version() == "1.0":
            cycle: Any = self.cycle
            cycle.send = functools.partial(_send_unchunked, cycle, cycle.send)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, functools.partial(self._answer, cycle, app))

    async def _answer(
        self, cycle: RequestResponseCycle, app: Any, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Runs the application. An answer that it gives up halfway takes its connection along, at once:
        what nobody fetches would keep it open for as long as the client likes."""
        try:
            await app(scope, receive, send)
        finally:
            if cycle.response_started and not (cycle.response_complete or cycle.disconnected):
                cycle.disconnected = True
                self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._flush is not None:
            self._flush.begin()
        if self._in_header:  # of the next request, which could not be finished meanwhile
            self._arm()

    @property
    def _answered(self) -> bool:
        """Whether no request waits for its answer, or for the end of it."""
        return self.cycle is None or self.cycle.response_complete

    async def _answer_too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a request whose header came whole and is too large."""
        self._tell_refused(431, _too_large(self.limits))
        await send_error(send, ApiError(431, _too_large(self.limits)))

    def _refuse(self, status: bytes, message: str) -> None:
        """Answers what no application can be asked about, and ends the connection.

        Behind a whole request there is no place for it before that one's answer, which ends the connection.
        """
        cycle = self.cycle
        in_body = cycle is self._answering and not self._answered and cycle.more_body
        if not (self._answered or (in_body and not cycle.response_started)):
            self._deaf = True
            cycle.keep_alive = False
            return
        self._tell_refused(int(status[:3]), message)
        body = encode(ApiError(int(status[:3]), message).body)
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            len(body),
        )
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()

    # The time that a header may take

    def _arm(self) -> None:
        """Starts it, unless it runs, or an answer under way has the connection."""
        if self._header_timer is not None or not self._answered or self.transport.is_closing():
            return
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()


class _FlushWatch:
    """Drops a connection of whose answer, written whole, nothing was fetched for `seconds`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Call it when an answer is written."""
        self._look(UNKNOWN_LENGTH)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, before: int) -> None:
        """`before`: bytes that waited at the last look."""
        waiting = self._transport.get_write_buffer_size()
        if waiting >= before:
            self._transport.abort()
        elif waiting:
            self.end()
            self._timer = self._loop.call_later(self._seconds, self._look, waiting)


def _too_large(limits: HttpConfig) -> str:
    return f"request header too large: expected ≤ {limits.max_header_bytes} bytes"


async def _send_unchunked(cycle: RequestResponseCycle, send: Send, message: Message) -> None:
    """`cycle.send` where an answer without a length ends with its connection."""
    if message["type"] == "http.response.start":
        if all(name.lower() != b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding, cycle.expected_content_length = False, UNKNOWN_LENGTH
    elif not message.get("more_body", False) and cycle.expected_content_length > UNKNOWN_LENGTH >> 1:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
