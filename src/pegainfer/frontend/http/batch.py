"""Files of requests, in OpenAI's batch format, answered by the same handlers as over HTTP.

in.jsonl:  {"custom_id", "method": "POST", "url", "body"} a line
out.jsonl: {"id", "custom_id", "response": {"status_code", "request_id", "body"} | null, "error"} a line

Answers are written as they come, so that a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.frontend.http.app import App
from pegainfer.frontend.http.body import load_json
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses import encode

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
RETRY_SECONDS = 0.2  # when the queue is full
MAX_FRAME = 64 << 10  # bytes of a line beside its body
MAX_READ = 1 << 20  # bytes of a line that are read at once where they are not kept


class BatchError(msgspec.Struct):
    code: str
    message: str


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, kw_only=True):
    """A line of the output. error: why a line is no request; a request that fails has a response."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def key(self) -> str:
        """What tells a line's answer: its custom_id, or its fault, which names the line."""
        if self.custom_id is not None:
            return "id:" + self.custom_id
        return "fault:" + ("" if self.error is None else self.error.message)


@dataclass(frozen=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """As its answer's."""
        return "id:" + self.custom_id


@dataclass
class Counts:
    """Of lines."""

    kept: int = 0  # answered by an earlier run
    answered: int = 0
    failed: int = 0


def read_lines(file: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank with their numbers; of one longer than `most` bytes only its beginning."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_READ)):
            pass
        if line.strip():
            yield number, line


def count_lines(path: Path) -> int:
    """Lines of the input that are not blank. Raises ConfigError where it cannot be read."""
    with open_input(path) as file:
        return sum(1 for _ in read_lines(file, MAX_READ))


def open_input(path: Path) -> IO[bytes]:
    """Raises ConfigError, also for what cannot be read twice: the lines are counted first."""
    try:
        _check_file(path, "input", "write it to a file first")
        return path.open("rb")
    except OSError as e:
        raise ConfigError("cannot read the input", got=e.strerror, where=path) from e


def _check_file(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigError for a pipe, a folder or a device, whose lines may never end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"the {what} is no file", got=path, remedy=remedy)


def open_output(path: Path) -> tuple[IO[bytes], set[str]]:
    """The output, ready for further lines, and the keys of those that it holds.

    A last line without its end, as an interrupted run leaves it, is cut off. The file is this run's alone
    until it is closed.

    Raises ConfigError for a file that cannot be written, that is no output of a batch, or another run's.
    """
    try:
        _check_file(path, "output", "choose another --output")
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
    except OSError as e:
        raise ConfigError("cannot write the output", got=e.strerror, where=path) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError("another run writes this output", got=path, remedy="wait for its end") from None
    except OSError:  # a file system without locks
        pass
    keys: set[str] = set()
    end = 0
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            keys.add(msgspec.json.decode(line, type=BatchAnswer).key)
        except msgspec.MsgspecError as e:
            file.close()
            remedy = "choose another --output"
            what = f"line {number} is no answer of a batch"
            raise ConfigError(what, got=str(e), where=path, remedy=remedy) from None
        end += len(line)
    file.seek(end)
    file.truncate()
    return file, keys


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
