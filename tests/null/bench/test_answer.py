"""From an answer's bytes to a record."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.bench.answer import Answer
from pegainfer.bench.sse import EventParser
from pegainfer.bench.wire import Record


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


def streamed(*parts: tuple[float, bytes], status: int = 200, kind: str = "text/event-stream") -> Record:
    """The record of an answer sent at 10.0 whose parts came when they say."""
    record = Record(0, start=10.0)
    answer = Answer(record, stream=True)
    answer.head(status, kind)
    for now, data in parts:
        answer.feed(data, now)
    answer.end(99.0)
    return record


@given(st.lists(st.integers(0, 60), max_size=6))
def test_events_may_be_cut_anywhere(cuts: list[int]) -> None:
    raw = b"data: one\r\n\r\n: comment\n\nid: 3\ndata:two\ndata: three\n\ndata: four\n\n"
    edges = [0, *sorted(cuts), len(raw)]
    parser = EventParser()
    found = [e for a, b in itertools.pairwise(edges) for e in parser.feed(raw[a:b])]
    assert found == [b"one", b"two\nthree", b"four"]


def test_times_of_a_stream() -> None:
    record = streamed(
        (10.5, text("a")),
        (10.75, text("b")),
        (11.75, text("c", "length")),
        (11.9, event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}) + b"data: [DONE]\n\n"),
    )
    assert record.error == ""
    assert (record.ttft, record.itls, record.latency) == (0.5, [0.25, 1.0], 1.75)
    assert (record.prompt_tokens, record.output_tokens, record.chunks) == (7, 3, 3)
    assert record.text == "abc"


def test_a_chats_role_is_no_token_and_a_lone_finish_takes_no_time() -> None:
    record = streamed(
        (10.1, delta(role="assistant", content="")),
        (10.5, delta(content="a")),
        (11.0, delta(reasoning_content="b")),
        (12.0, delta("stop")),
        (12.0, b"data: [DONE]\n\n"),
    )
    assert (record.ttft, record.itls, record.latency, record.text) == (0.5, [0.5], 1.0, "ab")
    assert record.output_tokens is None


def test_a_stream_may_end_with_a_finish_and_no_mark() -> None:
    assert streamed((11.0, text("a", "stop"))).error == ""


@pytest.mark.parametrize(
    ("parts", "status", "kind", "reason"),
    [
        ([text("a")], 200, "text/event-stream", "the stream ended without a finish"),
        ([], 200, "text/event-stream", "the stream ended without a finish"),
        ([b"data: {]\n\n"], 200, "text/event-stream", "an event that is no chunk"),
        ([event(error={"message": "it broke"})], 200, "text/event-stream", "error in the stream: it broke"),
        ([b'{"error": {"message": "full"}}'], 503, "application/json", "HTTP 503: full"),
        ([b'{"detail": "no such"}'], 404, "application/json", "HTTP 404: no such"),
        ([b"<html>"], 502, "text/html", "HTTP 502: <html>"),
        ([b"{"], 200, "application/json", "a body that is no answer"),
        ([b'{"choices": []}'], 200, "application/json", "an answer without choices"),
    ],
)
def test_failures_have_a_reason(parts: list[bytes], status: int, kind: str, reason: str) -> None:
    record = streamed(*((11.0, part) for part in parts), status=status, kind=kind)
    assert record.error.startswith(reason)


def test_a_whole_answer() -> None:
    record = Record(0, start=10.0)
    answer = Answer(record, stream=False)
    answer.head(200, "application/json")
    usage = {"prompt_tokens": 4, "completion_tokens": 9}
    raw = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": usage}).encode()
    answer.feed(raw[:10], 10.1)
    answer.feed(raw[10:], 10.2)
    answer.end(10.25)
    assert (record.error, record.text, record.latency, record.ttft) == ("", "hi", 0.25, 0.0)
    assert (record.prompt_tokens, record.output_tokens) == (4, 9)
