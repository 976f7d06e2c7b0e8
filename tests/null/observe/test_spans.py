"""Spans of requests: their times, their parent, their attributes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.observation import RequestRecord
from pegainfer.observe import spans as spans_module
from pegainfer.observe.spans import Tracer, to_endpoint

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


LIST = RequestRecord(method="GET", path="/v1/models", status=200, began=1.0)


@pytest.fixture
def spans() -> Iterator[tuple[Tracer, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    tracer = Tracer(SimpleSpanProcessor(exporter))
    yield tracer, exporter
    tracer.close()


def chat(**changes: object) -> RequestRecord:
    fields = {
        "method": "POST", "path": "/v1/chat/completions", "status": 200, "began": 1000.0, "seconds": 2.0,
        "id": "chatcmpl-1", "model": "m", "prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 5,
        "first_token": 0.5, "queue": 0.125, "stages": {"template": 0.0625},
        "finish": ("stop",), "temperature": 0.0, "max_tokens": 64,
        "traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=b",
    }  # fmt: skip
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_generation_is_part_of_the_callers_trace(spans: tuple[Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    tracer(chat())
    (span,) = exporter.get_finished_spans()
    assert span.name == "chat m" and span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == SPAN
    assert span.parent.trace_state.get("a") == "b"
    assert (span.start_time, span.end_time) == (1000 * 10**9, 1002 * 10**9)
    assert [(e.name, e.timestamp) for e in span.events] == [("gen_ai.first_token", 1_000_500_000_000)]
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == 7 and attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.request.temperature"] == 0.0 and attributes["gen_ai.request.max_tokens"] == 64
    assert "gen_ai.request.top_p" not in attributes
    assert attributes["pegainfer.template_seconds"] == 0.0625
    assert attributes["gen_ai.latency.time_in_queue"] == 0.125
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("record", "name", "code"),
    [
        (chat(status=503, model="", traceparent=""), "POST /v1/chat/completions", StatusCode.ERROR),
        (chat(status=400, model="", traceparent="nonsense"), "POST /v1/chat/completions", StatusCode.UNSET),
        (chat(gone=True), "chat m", StatusCode.ERROR),
        (
            RequestRecord(method="GET", path="/v1/models", status=200, began=1.0),
            "GET /v1/models",
            StatusCode.UNSET,
        ),
    ],
)
def test_other_ends(
    spans: tuple[Tracer, InMemorySpanExporter], record: RequestRecord, name: str, code: StatusCode
) -> None:
    tracer, exporter = spans
    tracer(record)
    (span,) = exporter.get_finished_spans()
    assert span.name == name and span.status.status_code is code
    assert (span.parent is None) == (TRACE not in record.traceparent)


def test_what_machines_ask_every_second_makes_no_span(spans: tuple[Tracer, InMemorySpanExporter]) -> None:
    tracer, exporter = spans
    for path in ("/health", "/ready", "/metrics", "/load"):
        tracer(RequestRecord(method="GET", path=path, began=1.0, status=200))
    assert not exporter.get_finished_spans()


def test_what_is_no_endpoint() -> None:
    with pytest.raises(ConfigError, match=r"expected an http\(s\) URL.*got localhost:4318"):
        to_endpoint("localhost:4318")


def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, ended = threading.Event(), threading.Event()

    class Stuck(SimpleSpanProcessor):
        def shutdown(self) -> None:
            stuck.wait()
            ended.set()

    monkeypatch.setattr(spans_module, "CLOSE_SECONDS", 0.01)
    Tracer(Stuck(InMemorySpanExporter())).close()  # returns
    assert not ended.is_set()
    stuck.set()
    assert ended.wait(30)


def test_the_library_complains_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("opentelemetry")
    monkeypatch.setattr(library, "handlers", [])
    monkeypatch.setattr(library, "propagate", True)
    now = [1000.0]
    monkeypatch.setattr(spans_module.time, "monotonic", lambda: now[0])
    spans_module._complain_seldom()
    lines = logging.getLogger("opentelemetry.some.exporter")
    for second in (0, 1, 59, 60):
        now[0] = 1000.0 + second
        lines.warning("Queue full, dropping %s.", "Span")
    assert [r.getMessage() for r in caplog.records] == ["traces are not sent: Queue full, dropping Span."] * 2
