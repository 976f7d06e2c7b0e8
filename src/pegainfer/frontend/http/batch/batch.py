"""Files of requests, in OpenAI's batch format (batch_files.py), answered by the same handlers as over HTTP.

Answers are written as they come, so that a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from pegainfer.contract.errors import EngineDeadError
from pegainfer.frontend.http.answer.responses import encode
from pegainfer.frontend.http.app import App
from pegainfer.frontend.http.batch.batch_files import (
    BatchAnswer,
    BatchError,
    BatchRequest,
    BatchResponse,
    read_lines,
)
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.body import load_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
RETRY_SECONDS = 0.2  # when the queue is full
MAX_FRAME = 64 << 10  # bytes of a line beside its body


@dataclass
class Counts:
    """Of lines."""

    kept: int = 0  # answered by an earlier run
    answered: int = 0
    failed: int = 0


class BatchRun:
    """One run over an input. Everything runs on the event loop; reading and writing a line is quick."""

    def __init__(
        self,
        app: App,
        output: IO[bytes],
        done: set[str],
        *,
        concurrency: int,
        on_line: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            done: keys of the lines that are not answered again.
            concurrency: requests under way at a time.
            on_line: called whenever a line is done with.
        """
        self._app = app
        self._output = output
        self._done = done
        self._concurrency = concurrency
        self._on_line = on_line
        self._seen: set[str] = set()
        self.counts = Counts()

    async def run(self, file: IO[bytes]) -> Counts:
        """Answers every line that is not answered yet.

        Raises EngineDeadError where the engine has ended; lines without an answer are then left out.
        """
        lines = read_lines(file, self._app.front.config.max_body_bytes + MAX_FRAME)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work(lines))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return self.counts

    async def _work(self, lines: Iterator[tuple[int, bytes]]) -> None:
        for number, line in lines:
            found = self._read(number, line)
            if found.key in self._done:
                self.counts.kept += 1
                self._on_line()
            else:
                self._write(found if isinstance(found, BatchAnswer) else await self._answer(found))

    def _write(self, answer: BatchAnswer) -> None:
        if answer.response is not None and answer.response.status_code < 400:
            self.counts.answered += 1
        else:
            self.counts.failed += 1
        self._output.write(encode(answer) + b"\n")
        self._output.flush()
        self._on_line()

    def _read(self, number: int, line: bytes) -> BatchRequest | BatchAnswer:
        """The request of a line, or the answer to a line that is none."""
        custom_id: str | None = None
        config = self._app.front.config
        try:
            if len(line) > (most := config.max_body_bytes + MAX_FRAME):
                raise ApiError(400, f"too long; expected ≤ {most} bytes")
            value = load_json(line, config.max_json_depth + 1)
            if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
                custom_id = value["custom_id"]
            request = _request(value)
            if request.custom_id in self._seen:
                custom_id = None
                raise ApiError(400, f"custom_id: {request.custom_id[:80]!r} is an earlier line's")
            self._seen.add(request.custom_id)
            return request
        except ApiError as error:
            fault = BatchError("invalid_request", f"line {number}: {error.message}")
            return BatchAnswer(id=_id(), custom_id=custom_id, response=None, error=fault)

    async def _answer(self, request: BatchRequest) -> BatchAnswer:
        body = encode(request.body)
        while True:
            call = _Call(request.url, body)
            await self._app(call.scope, call.receive, call.send)
            if call.status != 503:
                break
            if not self._app.front.engine.alive():
                raise EngineDeadError("the engine has ended", remedy="run the batch again: it goes on here")
            await asyncio.sleep(RETRY_SECONDS)
        response = BatchResponse(call.status, call.request_id, msgspec.Raw(bytes(call.body)))
        return BatchAnswer(id=_id(), custom_id=request.custom_id, response=response, error=None)


def _id() -> str:
    return "batch_req_" + uuid.uuid4().hex


def _request(value: Any) -> BatchRequest:
    """Raises ApiError for what is no request."""
    if not isinstance(value, dict):
        raise ApiError(400, "expected a JSON object")
    unknown = sorted(value.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        raise ApiError(400, f"{unknown[0][:80]}: unknown field")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ApiError(400, "custom_id: expected a text")
    if value.get("method") != "POST":
        raise ApiError(400, f"method: expected POST, got {str(value.get('method'))[:40]!r}")
    url = value.get("url")
    if url not in URLS:
        raise ApiError(400, f"url: expected one of {', '.join(URLS)}, got {str(url)[:80]!r}")
    if not isinstance(body, dict):
        raise ApiError(400, "body: expected a JSON object")
    for name in ("stream", "background"):
        if body.get(name):
            raise ApiError(400, f"body.{name}: expected false in a batch")
    return BatchRequest(custom_id, url, body)


class _Call:
    """One request to the app, without a socket."""

    def __init__(self, url: str, body: bytes) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.status = 0
        self.request_id = ""
        self.body = bytearray()
        self._sent: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._sent is None:
            await asyncio.Event().wait()  # this client never hangs up
        body, self._sent = self._sent, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = next((v.decode() for k, v in message["headers"] if k == b"x-request-id"), "")
        else:
            self.body += message.get("body", b"")
