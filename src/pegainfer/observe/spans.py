"""OpenTelemetry spans of requests, with the attributes of its conventions for generative AI.

A request that carries a W3C trace context becomes part of that trace.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pegainfer import __version__
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.observation import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanProcessor  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

# Route -> gen_ai.operation.name; other routes have plain HTTP spans.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
CLOSE_SECONDS = 5.0  # that the end of the server waits for a collector
COMPLAIN_SECONDS = 60.0  # between two complaints about it
QUIET = frozenset({"/health", "/ready", "/metrics", "/load"})  # asked every second by machines


class Tracer:
    """An observer of requests that makes each one a span, of the time between its two ends."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor`: takes the spans; `to_endpoint` makes one."""
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # What OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say wins over the second.
        own = Resource({SERVICE_NAME: "pegainfer", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=own.merge(Resource.create()), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pegainfer", __version__)
        self._context = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        if record.path in QUIET:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
        operation = OPERATIONS.get(record.path)
        begin = int(record.began * 1e9)
        span = self._tracer.start_span(
            f"{operation} {record.model}" if operation and record.model else f"{record.method} {record.path}",
            context=self._context.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=begin,
            attributes=_attributes(record, operation),
        )
        if record.first_token:
            span.add_event("gen_ai.first_token", timestamp=begin + int(record.first_token * 1e9))
        if record.status >= 500 or record.gone:
            why = "the client hung up" if record.gone else f"HTTP {record.status}"
            span.set_status(Status(StatusCode.ERROR, why))
        span.end(begin + int(record.seconds * 1e9))

    def close(self) -> None:
        """Sends what waits, to a collector that takes it within a few seconds."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(CLOSE_SECONDS)


def to_endpoint(url: str) -> Tracer:
    """A tracer that sends to an OTLP endpoint over HTTP, in batches, from a thread of its own.

    Raises ConfigError without the `otel` extra or for what is no URL.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "no endpoint for traces", expected="an http(s) URL, as http://localhost:4318/v1/traces", got=url,
            where="--otlp-traces-endpoint",
        )  # fmt: skip
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise ConfigError(
            "OpenTelemetry is not installed", got=e, where="--otlp-traces-endpoint",
            remedy="pip install 'pegainfer[otel]'",
        ) from None  # fmt: skip
    _complain_seldom()
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))


def _complain_seldom() -> None:
    """The library speaks of every span without room and of every try that fails: a line a minute will do."""

    class Seldom(logging.Handler):
        last = -COMPLAIN_SECONDS

        def emit(self, record: logging.LogRecord) -> None:
            now = time.monotonic()
            if now - self.last >= COMPLAIN_SECONDS:
                self.last = now
                log.warning("traces are not sent: %s", record.getMessage()[:500])

    library = logging.getLogger("opentelemetry")
    library.propagate = False
    library.handlers = [Seldom(logging.WARNING)]


def _attributes(record: RequestRecord, operation: str | None) -> dict[str, str | int | float | list[str]]:
    found: dict[str, str | int | float | list[str]] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "client.address": record.client,
    }
    if operation is None or not record.model:
        return found
    found |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pegainfer",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.id,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": list(record.finish),
        "gen_ai.latency.time_in_queue": record.queue,
        "gen_ai.latency.time_to_first_token": record.first_token,
        "gen_ai.latency.e2e": record.seconds,
    }
    found |= {f"pegainfer.{name}_seconds": seconds for name, seconds in record.stages.items()}
    settings = {"temperature": record.temperature, "top_p": record.top_p, "max_tokens": record.max_tokens}
    return found | {f"gen_ai.request.{k}": v for k, v in settings.items() if v is not None}
