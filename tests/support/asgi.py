"""Clients for an ASGI app in the same process: httpx for whole answers, a bare one for what httpx hides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import httpx

from pegainfer.contract.observation import Observer, TraceBuffer
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.fake_engine import FakeEngine

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(TOKENIZER.chat_template or "", TOKENIZER.config.special_tokens)


def make_app(
    engine: FakeEngine,
    *,
    template: bool = True,
    names: tuple[str, ...] = (),
    observers: Sequence[Observer] = (),
    buffer: TraceBuffer | None = None,
    **config: Any,
) -> App:
    """An app over the fake engine; keyword arguments are HttpConfig's."""
    chat = TEMPLATE if template else None
    return create_app(
        engine, TOKENIZER, chat, HttpConfig(**config), names=names, observers=observers, buffer=buffer
    )


def client(app: App, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs an async test."""
    asyncio.run(asyncio.wait_for(main(), 110))


def ask(
    engine: FakeEngine, path: str, body: Any = None, *, method: str | None = None, **config: Any
) -> httpx.Response:
    """One request to a fresh app. `body`: JSON, or bytes as they are; the method is GET without one."""
    app = make_app(engine, **config)

    async def main() -> httpx.Response:
        async with client(app) as http:
            if body is None:
                return await http.request(method or "GET", path)
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.request(method or "POST", path, content=raw)

    return asyncio.run(asyncio.wait_for(main(), 110))


class Call:
    """One request whose every message is in the test's hands. Use it within a running loop."""

    def __init__(
        self,
        app: App,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
    ) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.ended = False
        self._changed = asyncio.Event()
        self.gate: Callable[[], Awaitable[None]] | None = None  # awaited by every send: a slow reader
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))
        self.task.add_done_callback(lambda task: self._changed.set())

    async def _send(self, message: Any) -> None:
        if self.gate is not None:
            await self.gate()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.writes.append(message["body"])
            self.ended = not message.get("more_body", False)
            if self.ended:
                self._inbox.put_nowait({"type": "http.disconnect"})
        self._changed.set()

    def disconnect(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for the app's messages to make a condition true; fails where the app has ended without."""
        while not condition():
            if self.task.done():
                self.task.result()
                raise AssertionError(f"the answer ended: {self.status} {self.body!r}")
            self._changed.clear()
            await self._changed.wait()

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)


def events(body: bytes | str) -> list[Any]:
    """The data of a stream's events, JSON decoded; '[DONE]' and comments as they are."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n")
    out: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            out.append(block)
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        out.append(data if data == "[DONE]" else json.loads(data))
    return out


def stream_text(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice, from the chunks of either route."""
    text = ""
    for chunk in chunks:
        if isinstance(chunk, str) or "error" in chunk:
            continue
        for choice in chunk["choices"]:
            if choice["index"] == index:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


async def spin(turns: int = 20) -> None:
    """Lets everything that is ready run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def named_events(body: bytes | str) -> list[tuple[str, Any]]:
    """The events of a stream that gives them names, each with its data; comments are left out."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n")
    out: list[tuple[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        out.append((name.removeprefix("event: "), value))
    return out
