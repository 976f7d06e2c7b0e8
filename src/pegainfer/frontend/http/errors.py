"""What a client is told when its request fails: one shape, one table of statuses."""

from __future__ import annotations

import logging

import msgspec

from pegainfer.contract.errors import (
    DeadlineError,
    EngineDeadError,
    PegaError,
    QueueFullError,
    RequestError,
    UnsupportedError,
)
from pegainfer.contract.event import TokenEvent

log = logging.getLogger(__name__)

INTERNAL = "internal error; the server's log has the details"
MAX_MESSAGE = 1000  # characters: a message may quote the request, which can be megabytes
RETRY_DEAD_ENGINE = 10.0  # seconds: about what a supervisor needs to start a new one


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(Exception):
    """An answer instead of a result.

    Args:
        status: HTTP status, used where nothing was sent yet.
        param: the request's field to blame.
        retry_after: seconds for the Retry-After header; none if 0.
        allow: methods for the Allow header of a 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 0.0,
        allow: str | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = message[:MAX_MESSAGE] + "…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    @property
    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorBody(ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def to_api_error(exc: Exception) -> ApiError:
    """The answer for any exception. What is not the user's to know is logged and called internal."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, PegaError) and type(exc).__name__ in _KINDS:
        param, retry_after = getattr(exc, "param", None), getattr(exc, "retry_after", 0.0)
        return _of_kind(type(exc).__name__, str(exc), param, retry_after)
    log.error("a request failed", exc_info=exc)
    return ApiError(500, INTERNAL)


def event_error(event: TokenEvent) -> ApiError:
    """The answer for an ERROR event of the engine."""
    message = event.error or INTERNAL
    if event.error_kind in _KINDS:
        return _of_kind(event.error_kind, message, event.error_param, event.retry_after)
    return ApiError(500, message)


# Names of contract.errors, because an event carries the name: (status, code).
_KINDS: dict[str | None, tuple[int, str | None]] = {
    RequestError.__name__: (400, None),
    UnsupportedError.__name__: (400, "unsupported"),
    QueueFullError.__name__: (503, "overloaded"),
    DeadlineError.__name__: (504, "timeout"),
    EngineDeadError.__name__: (503, "engine_dead"),
}


def _of_kind(kind: str | None, message: str, param: str | None, retry_after: float) -> ApiError:
    status, code = _KINDS[kind]
    if kind == EngineDeadError.__name__:
        retry_after = RETRY_DEAD_ENGINE
    return ApiError(status, message, param=param, code=code, retry_after=retry_after)
