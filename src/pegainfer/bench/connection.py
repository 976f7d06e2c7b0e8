"""One HTTP/1.1 connection: a request is written, the answer's bytes are handed on as they are read."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

import httptools


class Exchange(Protocol):
    """Who asked. Exactly one of `end` and `lost` ends an exchange."""

    def head(self, status: int, content_type: str) -> None: ...

    def feed(self, data: bytes, now: float) -> None: ...

    def end(self, now: float, *, reusable: bool) -> None: ...

    def lost(self, reason: str, *, untouched: bool) -> None:
        """`untouched`: not one byte of an answer came on a connection that had served before."""


class Connection(asyncio.Protocol):
    """Carries one exchange after the other; `closed` once it can carry no more."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._served = 0  # answers that were complete
        self._touched = False
        self._bounded = False  # the answer says where it ends
        self._in_body = False
        self._content_type = ""
        self._now = 0.0
        self.closed = False

    def request(self, data: bytes, exchange: Exchange) -> None:
        """Writes a whole request. The connection must be idle."""
        assert self._transport is not None and self._exchange is None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._touched = self._bounded = self._in_body = False
        self._content_type = ""
        self._transport.write(data)

    def close(self) -> None:
        """Hangs up; a running exchange is lost."""
        if self._transport is not None:
            self._transport.abort()

    def abandon(self) -> None:
        """Hangs up without a word to the exchange."""
        self._exchange = None
        self.close()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._exchange is None or self._parser is None:
            self.close()  # bytes that nobody asked for: what follows cannot be told apart
            return
        self._touched = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lose(f"not HTTP/1.1: {error}")
            self.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._exchange is None:
            return
        if self._in_body and not self._bounded and exc is None:  # the end of the connection ends the body
            self._finish(reusable=False)
            return
        state = "in the middle of the answer" if self._touched else "before an answer"
        self._lose(f"connection closed {state}" + (f": {exc}" if exc is not None else ""))

    # ------------------------------------------------------------------ httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._content_type = value.decode("latin-1").lower()
        elif lowered == b"content-length" or (
            lowered == b"transfer-encoding" and b"chunked" in value.lower()
        ):
            self._bounded = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._in_body = True
        if self._exchange is not None:
            self._exchange.head(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.feed(body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._bounded or not self._in_body:
            self._finish(reusable=bool(self._parser.should_keep_alive()))

    # ------------------------------------------------------------------ inside

    def _finish(self, *, reusable: bool) -> None:
        exchange, self._exchange = self._exchange, None
        self._served += 1
        if not reusable:
            self.close()
        if exchange is not None:
            exchange.end(self._now, reusable=reusable)

    def _lose(self, reason: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.lost(reason, untouched=self._served > 0 and not self._touched)
