"""One answer of an OpenAI-compatible server, followed event by event into a Record."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.bench.sse import EventParser
from pegainfer.bench.wire import Record

MAX_REASON = 200  # characters of an error's message that are kept
DONE = b"[DONE]"


class _Text(msgspec.Struct):
    """`delta` or `message` of a chat."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Body(msgspec.Struct):
    """A whole answer or one event; fields that are not named here are skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Body)
_any = msgspec.json.Decoder()


class Answer:
    """Fills `record` from an answer's bytes; what goes wrong becomes its error, nothing is raised."""

    def __init__(self, record: Record, *, stream: bool) -> None:
        self.record = record
        self._stream = stream
        self._events = EventParser()
        self._body: list[bytes] = []
        self._status = 0
        self._texts: list[str] = []
        self._last = 0.0  # when the last token came
        self._ended = False  # [DONE] or a finish has come

    def head(self, status: int, content_type: str) -> None:
        """The answer's head; a stream that comes as JSON is read as one body."""
        self._status = status
        self._stream = self._stream and status == 200 and not content_type.startswith("application/json")

    def feed(self, data: bytes, now: float) -> None:
        """`now`: CLOCK_MONOTONIC seconds at which the bytes were read."""
        if not self._stream:
            self._body.append(data)
            return
        for event in self._events.feed(data):
            if event == DONE:
                self._ended = True
                continue
            try:
                body = _decoder.decode(event)
            except msgspec.DecodeError as error:
                self.fail(f"an event that is no chunk: {error}")
                return
            self._take(body, now)

    def end(self, now: float) -> None:
        """The answer is complete as HTTP."""
        record = self.record
        if not self._stream:
            self._whole(now)
        elif not self._ended:
            self.fail("the stream ended without a finish")
        record.text = "".join(self._texts)

    def fail(self, reason: str) -> None:
        """Keeps the first reason."""
        if not self.record.error:
            self.record.error = reason[:MAX_REASON]

    def _take(self, body: _Body, now: float) -> None:
        record = self.record
        if body.error is not None:
            self.fail(f"error in the stream: {_message(body.error)}")
        if body.usage is not None:
            record.prompt_tokens = body.usage.prompt_tokens
            record.output_tokens = body.usage.completion_tokens
        if not body.choices:
            return
        choice = body.choices[0]
        text = choice.text
        if choice.delta is not None:
            delta = choice.delta
            text = delta.content or delta.reasoning_content or delta.reasoning
            if not text and not delta.tool_calls and choice.finish_reason is None:
                return  # the role alone, sent before there is a token
        if text:
            self._texts.append(text)
        if choice.finish_reason is not None:
            self._ended = True
            if not text and record.chunks and choice.delta is not None:
                return  # the finish came after the last token, alone
        if not record.chunks:
            record.ttft = now - record.start
        else:
            record.itls.append(now - self._last)
        record.chunks += 1
        self._last = now
        record.latency = now - record.start

    def _whole(self, now: float) -> None:
        record = self.record
        record.latency = now - record.start
        raw = b"".join(self._body)
        if self._status != 200:
            self.fail(f"HTTP {self._status}: {_error_text(raw)}")
            return
        try:
            body = _decoder.decode(raw)
        except msgspec.DecodeError as error:
            self.fail(f"a body that is no answer: {error}")
            return
        if body.error is not None or not body.choices:
            self.fail(f"an answer without choices: {_message(body.error)}")
            return
        if body.usage is not None:
            record.prompt_tokens = body.usage.prompt_tokens
            record.output_tokens = body.usage.completion_tokens
        choice = body.choices[0]
        record.chunks = 1
        self._texts.append(choice.text or (choice.message.content if choice.message else "") or "")


def _error_text(raw: bytes) -> str:
    """The message inside an error body, or the body's beginning."""
    try:
        return _message(_any.decode(raw))
    except msgspec.DecodeError:
        return raw[:MAX_REASON].decode("utf-8", "replace").strip()


def _message(error: Any) -> str:
    while isinstance(error, dict):
        inner = error.get("error", error.get("message", error.get("detail")))
        if inner is None:
            break
        error = inner
    return str(error)[:MAX_REASON]
