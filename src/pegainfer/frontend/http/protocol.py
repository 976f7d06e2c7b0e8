"""uvicorn's HTTP/1.1 protocol with the bounds that it lacks: header size and header time."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses import encode, send_error


def bounded_protocol(config: HttpConfig) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn's `http` option, with this configuration's limits."""
    limit = config.max_header_bytes
    seconds = config.header_seconds
    sentence = f"request header too large: expected ≤ {limit} bytes"

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, ApiError(431, sentence))

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_header = False
            self._header_bytes = 0  # of an unfinished header, its first read not counted
            self._header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            began_before = self._in_header
            super().data_received(data)
            if began_before and self._in_header:
                self._header_bytes += len(data)
                if self._header_bytes > limit and not self.transport.is_closing():
                    self._send_error(b"431 Request Header Fields Too Large", sentence)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_header = True
            self._header_bytes = 0
            if self._header_timer is None:
                self._arm()

        def on_headers_complete(self) -> None:
            self._in_header = False
            self._disarm()
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size <= limit:
                super().on_headers_complete()
                return
            app, self.app = self.app, refuse
            super().on_headers_complete()
            self.app = app

        def send_400_response(self, msg: str) -> None:
            self._send_error(b"400 Bad Request", "not an HTTP/1.1 request")

        def _send_error(self, status: bytes, message: str) -> None:
            body = encode(ApiError(int(status[:3]), message).body)
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
                status,
                len(body),
            )
            self.transport.write(head + b"connection: close\r\n\r\n" + body)
            self.transport.close()

        def _arm(self) -> None:
            self._header_timer = self.loop.call_later(seconds, self._too_slow)

        def _disarm(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _too_slow(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
