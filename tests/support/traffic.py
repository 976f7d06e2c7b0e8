"""Clients of every kind for a server under test: patient, gone, slow, wrong. Each says what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

FINISHES = {"stop", "length", "abort", "error", "timeout"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
HOST = "Host: localhost\r\n"
WORDS = ("river", "stone", "seven", "why", "¿qué?", "雨")
# Refusals that a client under load and faults may get; all others must not happen.
BUSY = {503, 504}


@dataclass
class Traffic:
    """Random requests to one server, reproducible by seed in what they ask.

    Args:
        words: most words of a prompt.
        tokens: most tokens of an answer.
    """

    host: str
    port: int
    seed: int
    words: int = 60
    tokens: int = 24
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds that a request took

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._number = 0

    async def run(self, seconds: float, clients: int) -> None:
        """So many clients at once, each sending one request after the other, until the time is over."""
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(clients)))

    async def one(self, kind: str) -> None:
        """One request of a kind; adds to `outcomes`, and to `faults` what ought not to happen."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            outcome = await asyncio.wait_for(KINDS[kind](self), 60)
        except TimeoutError:
            outcome = "hung"
            self.faults.append(f"{kind}: no end within a minute")
        except ConnectionError:
            outcome = "connection lost"
            self.faults.append(f"{kind}: connection lost")
        self.longest = max(self.longest, loop.time() - began)
        self.outcomes[f"{kind}: {outcome}"] += 1

    async def _client(self, end: float) -> None:
        kinds = list(KINDS)
        while asyncio.get_running_loop().time() < end:
            await self.one(self._random.choice(kinds))
            await asyncio.sleep(self._random.choice((0, 0, 0.01, 0.05)))

    # What is asked

    def body(self, **more: Any) -> dict[str, Any]:
        r = self._random
        self._number += 1
        prefix = "You are a helpful assistant. " * r.choice((0, 0, 4))
        words = (r.choice(WORDS) for _ in range(r.randint(1, self.words)))
        return {
            "prompt": prefix + " ".join(words),
            "max_tokens": r.randint(1, self.tokens),
            "temperature": r.choice((0, 0.7, 1.5)),
            "seed": r.randint(0, 1000),
            "ignore_eos": r.random() < 0.5,
            "request_id": f"{self.seed}-{self._number}",
            **more,
        }

    # How it is asked

    async def open(self, body: Any, path: str = "/v1/completions", limit: int = 1 << 16) -> Connection:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=limit)
        head = f"POST {path} HTTP/1.1\r\n{HOST}Content-Type: application/json\r\nConnection: close\r\n"
        writer.write(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return Connection(reader, writer)

    async def answer(self, body: Any, path: str = "/v1/completions") -> tuple[int, bytes]:
        """Status and body of a whole answer."""
        connection = await self.open(body, path)
        try:
            return await connection.status(), await connection.rest()
        finally:
            await connection.close()


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _chunked: bool = False
    _length: int = 0

    async def status(self) -> int:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        self._chunked = "transfer-encoding: chunked" in head
        lengths = [h.split(":")[1] for h in head.split("\r\n") if h.startswith("content-length:")]
        self._length = int(lengths[0]) if lengths else 0
        return int(head.split(" ")[1])

    async def piece(self) -> bytes:
        """The next chunk; nothing at the end."""
        if not self._chunked:
            length, self._length = self._length, 0
            return await self.reader.readexactly(length)
        size = int(await self.reader.readline(), 16)
        data = await self.reader.readexactly(size)
        await self.reader.readexactly(2)
        return data

    async def rest(self) -> bytes:
        out = b""
        while piece := await self.piece():
            out += piece
        return out

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def check_answer(traffic: Traffic, kind: str, status: int, data: bytes, choices: int) -> str:
    """Of an answer in one piece."""
    if status in BUSY:
        return str(status)
    if status != 200:
        traffic.faults.append(f"{kind}: {status} {data[:200]!r}")
        return str(status)
    found = [c["finish_reason"] for c in json.loads(data)["choices"]]
    if len(found) != choices or not set(found) <= FINISHES:
        traffic.faults.append(f"{kind}: finishes {found}, expected {choices}")
    return "answered"


def check_stream(traffic: Traffic, kind: str, data: bytes, choices: int) -> str:
    """Of a stream that was read to its end: each choice finished once, or one error; then [DONE]."""
    events = [e.removeprefix(b"data: ") for e in data.split(b"\n\n") if e.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        traffic.faults.append(f"{kind}: a stream without its end: {data[-100:]!r}")
        return "cut"
    finishes: Counter[int] = Counter()
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return "error told"
        for choice in event["choices"]:
            finishes[choice["index"]] += choice["finish_reason"] is not None
    if finishes != Counter(range(choices)):
        traffic.faults.append(f"{kind}: finishes {finishes}, expected one for each of {choices}")
    return "answered"


async def _whole(t: Traffic) -> str:
    n = t._random.choice((1, 1, 2))
    status, data = await t.answer(t.body(n=n, logprobs=t._random.choice((None, 2))))
    return check_answer(t, "whole", status, data, n)


async def _stream(t: Traffic, n: int = 1, **more: Any) -> str:
    connection = await t.open(t.body(stream=True, n=n, **more))
    try:
        status = await connection.status()
        data = await connection.rest()
    finally:
        await connection.close()
    return check_stream(t, "stream", data, n) if status == 200 else check_answer(t, "stream", status, data, n)


async def _many(t: Traffic) -> str:
    return await _stream(t, n=3, logprobs=3)


async def _chat(t: Traffic) -> str:
    r = t._random
    turns = [{"role": r.choice(("user", "system")), "content": "Say something. " * r.randint(1, 8)}]
    body = {"messages": turns, "max_tokens": r.randint(1, t.tokens), "temperature": 1}
    status, data = await t.answer(body, "/v1/chat/completions")
    return check_answer(t, "chat", status, data, 1)


async def _schema(t: Traffic) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    status, data = await t.answer(t.body(response_format=form, max_tokens=t.tokens))
    return check_answer(t, "schema", status, data, 1)


async def _leave(t: Traffic) -> str:
    """Hangs up after some pieces of a stream, or before any."""
    connection = await t.open(t.body(stream=True, n=t._random.choice((1, 2)), logprobs=1))
    wanted = t._random.choice((0, 0, 1, 2))
    try:
        status = await connection.status() if wanted else 200
        if status != 200:
            return check_answer(t, "leave", status, await connection.rest(), 1)
        for _ in range(wanted):
            await connection.piece()
    finally:
        await connection.close()
    return "left"


async def _leave_in_body(t: Traffic) -> str:
    reader, writer = await asyncio.open_connection(t.host, t.port)
    writer.write(f'POST /v1/completions HTTP/1.1\r\n{HOST}Content-Length: 500\r\n\r\n{{"prompt": '.encode())
    await writer.drain()
    await Connection(reader, writer).close()
    return "left"


async def _slow(t: Traffic) -> str:
    """Reads a few bytes at a time."""
    connection = await t.open(t.body(stream=True, max_tokens=t.tokens), limit=256)
    try:
        status = await connection.status()
        data = b""
        while piece := await connection.piece():
            data += piece
            await asyncio.sleep(0.01)
    finally:
        await connection.close()
    return check_stream(t, "slow", data, 1) if status == 200 else check_answer(t, "slow", status, data, 1)


async def _abort(t: Traffic) -> str:
    body = t.body(stream=True, ignore_eos=True)
    connection = await t.open(body)
    try:
        status = await connection.status()
        await t.answer({"request_id": body["request_id"]}, "/v1/abort")  # it may have ended before
        data = await connection.rest()
    finally:
        await connection.close()
    return check_stream(t, "abort", data, 1) if status == 200 else check_answer(t, "abort", status, data, 1)


async def _deadline(t: Traffic) -> str:
    status, data = await t.answer(t.body(timeout=t._random.choice((0.001, 0.02, 0.2))))
    return check_answer(t, "deadline", status, data, 1)


WRONG: tuple[tuple[Any, str], ...] = (
    (b"{", "/v1/completions"),
    (b"\xff\xfe", "/v1/completions"),
    ({"prompt": "a", "nonsense": 1}, "/v1/completions"),
    ({"prompt": "a", "temperature": -1}, "/v1/completions"),
    ({"prompt": "a", "logit_bias": {"99999999": 5}}, "/v1/completions"),
    ({"prompt": "a", "stop_token_ids": [99999999]}, "/v1/completions"),
    ({"prompt": [2**40]}, "/v1/completions"),
    ({"prompt": "x" * 300_000}, "/v1/completions"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "/v1/completions"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "/v1/chat/completions"),
    ({"messages": [], "max_tokens": 0}, "/v1/chat/completions"),
    (b"[" * 10_000, "/v1/chat/completions"),
    ({}, "/v1/nowhere"),
)


async def _wrong(t: Traffic) -> str:
    body, path = t._random.choice(WRONG)
    status, data = await t.answer(body, path)
    if status not in {400, 404} | BUSY:
        t.faults.append(f"wrong: {status} for {str(body)[:80]} {data[:200]!r}")
    return str(status)


async def _garbage(t: Traffic) -> str:
    reader, writer = await asyncio.open_connection(t.host, t.port)
    writer.write(bytes(t._random.randrange(256) for _ in range(200)) + b"\r\n\r\n")
    with contextlib.suppress(TimeoutError, ConnectionError):
        await asyncio.wait_for(reader.read(), 5)
    await Connection(reader, writer).close()
    return "sent"


Kind = Callable[[Traffic], Awaitable[str]]
KINDS: dict[str, Kind] = {
    "whole": _whole,
    "stream": _stream,
    "many": _many,
    "chat": _chat,
    "schema": _schema,
    "leave": _leave,
    "leave in body": _leave_in_body,
    "slow": _slow,
    "abort": _abort,
    "deadline": _deadline,
    "wrong": _wrong,
    "garbage": _garbage,
}
