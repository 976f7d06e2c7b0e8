"""Plain ASGI answers: JSON bodies and event streams, without a task group or a queue around them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Send

from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.observation.observed import note_error
from pegainfer.frontend.http.request.body import ClientGoneError

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

KEEP_ALIVE = b": keep-alive\n\n"
# UTF-8 of NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR, which JSON holds in strings alone.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
DONE = b"data: [DONE]\n\n"

Headers = Sequence[tuple[bytes, bytes]]


async def send_bytes(
    send: Send,
    body: bytes,
    *,
    status: int = 200,
    content_type: bytes = b"application/json",
    headers: Headers = (),
) -> None:
    """One whole response."""
    head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, *, status: int = 200, headers: Headers = ()) -> None:
    await send_bytes(send, encode(value), status=status, headers=headers)


def error_headers(error: ApiError) -> dict[str, str]:
    """Those that an error's answer has beside its content's."""
    headers: dict[str, str] = {}
    if error.retry_after > 0:
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if error.allow is not None:
        headers["allow"] = error.allow
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413, 431):
        headers["connection"] = "close"  # the rest of the request is not worth reading
    return headers


async def send_error(send: Send, error: ApiError, path: str = "") -> None:
    """`path`: of the request, which decides the body's shape."""
    note_error(error.message, error.status)
    headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await send_json(send, error.body_at(path), status=error.status, headers=headers)


def sse(value: Any) -> bytes:
    """One server-sent event. JSON from msgspec holds no newline, so one data line is enough.

    Unicode's other line ends are escaped: many clients cut lines there, too.
    """
    body = encode(value)
    if not body.isascii():
        for raw, escaped in _LINE_ENDS:
            body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """One server-sent event with a name, as OpenAI's responses and Anthropic's messages have them."""
    return b"event: " + name.encode() + b"\n" + sse(value)


class EventStream:
    """A text/event-stream response that starts with its first write."""

    def __init__(self, send: Send, headers: Headers, seconds: float) -> None:
        """`seconds`: how long one write may wait for the client to read."""
        self._send = send
        self._seconds = seconds
        self._headers = headers
        self.started = False

    async def write(self, data: bytes) -> None:
        """Waits where the client reads too slowly; raises ClientGoneError where it does not read."""
        if not self.started:
            self.started = True
            head = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
                *self._headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        await self._body(data, more=True)

    async def end(self, data: bytes = DONE) -> None:
        """Sends the last bytes and ends the answer. Raises ClientGoneError where nobody fetches them."""
        if not self.started:
            await self.write(data)
            data = b""
        await self._body(data, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGoneError from None
