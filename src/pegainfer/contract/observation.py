"""What is known of one HTTP request once it has been answered: for access logs and traces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from pegainfer.contract.event import Timings
from pegainfer.contract.trace import StepTrace


class RequestRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. Times are UNIX seconds, durations seconds; 0 and "" stand for what there was none of.

    Args:
        path: without the query.
        client: address of the other side.
        status: 0 where nothing was answered: the client had gone.
        num_bytes: of the answer's body.
        traceparent, tracestate: the caller's trace context (W3C).
        first_token: time until the first token, queue included.
        queue: of it, time until the first step.
        finish: one reason a choice.
        clock: CLOCK_MONOTONIC seconds at `began`.
        stages: seconds in the front by stage: body, template, grammar, tokenize, detokenize, socket (waiting
            until the client's connection takes the answer).
        timings: the engine's, of the choice that ended last.
        late: time between the end of that choice in the engine and the moment when the front knew of it.
        gap: longest time between two deliveries of a choice.
        error: why it was refused or has failed, as the client was told; may quote a value of the request.
    """

    method: str
    path: str
    client: str = ""
    status: int = 0
    began: float
    seconds: float = 0.0
    num_bytes: int = 0
    traceparent: str = ""
    tracestate: str = ""
    id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float = 0.0
    queue: float = 0.0
    finish: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    clock: float = 0.0
    stages: dict[str, float] = {}
    timings: Timings | None = None
    late: float = 0.0
    gap: float = 0.0
    gone: bool = False  # the client hung up before the end
    error: str = ""


class TraceBuffer(Protocol):
    """Keeps the last steps and requests of a trace."""

    def __call__(self, record: RequestRecord) -> None:
        """A request was answered."""

    def steps(self, steps: list[StepTrace]) -> None:
        """Steps that the engine recorded."""

    def encoded(self, since: float) -> bytes:
        """The trace as a file holds it, from `since` on (CLOCK_MONOTONIC seconds)."""

    def slow_requests(self) -> list[dict[str, Any]]:
        """The last slow requests, newest first: id, seconds, cause, sentence."""


Observer = Callable[[RequestRecord], None]  # called on the event loop: it must not block


class FailureObserver(ABC):
    """An observer of refused and failed requests alone. Others cost it nothing: no record is made for them.

    While no other observer is there, a record holds only the request line, the client, the status and error,
    and the times of the request as a whole.
    """

    @abstractmethod
    def __call__(self, record: RequestRecord) -> None:
        """A request was refused or has failed. Called on the event loop: it must not block."""
