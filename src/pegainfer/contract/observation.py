"""What is known of one HTTP request once it has been answered: for access logs and traces."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


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
    gone: bool = False  # the client hung up before the end
    error: str = ""


Observer = Callable[[RequestRecord], None]  # called on the event loop: it must not block
