"""What a client is told when its request fails: OpenAI's shape and Anthropic's, one table of statuses."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping

import msgspec

from pegainfer.contract.errors import (
    DeadlineError,
    EngineDeadError,
    PegaError,
    QueueFullError,
    RequestError,
    UnsupportedError,
    error_fields,
)
from pegainfer.contract.event import TokenEvent

log = logging.getLogger(__name__)

# Patterns of a field's beginning, and what a route calls it.
Names = tuple[tuple[re.Pattern[str], str], ...]
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


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: str = "error"
    error: AnthropicDetail


ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/")  # the route, and what those below it begin with


class ApiError(Exception):
    """An answer instead of a result.

    Args:
        status: HTTP status, used where nothing was sent yet.
        param: the request's field to blame.
        retry_after: seconds for the Retry-After header; none if 0.
        allow: methods for the Allow header of a 405.
        anthropic: the message in Anthropic's shape, where its clients look for another text.
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
        anthropic: str | None = None,
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
        self.anthropic = anthropic

    @property
    def body(self) -> ErrorBody:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorBody(ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))

    @property
    def anthropic_body(self) -> AnthropicError:
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return AnthropicError(error=AnthropicDetail(kind, self.anthropic or self.message))

    def body_at(self, path: str) -> ErrorBody | AnthropicError:
        """The body for a request to this path."""
        route, below = ANTHROPIC_PATHS
        return self.anthropic_body if path == route or path.startswith(below) else self.body

    def renamed(self, names: Names) -> ApiError:
        """The same error where a route calls its fields otherwise.

        Args:
            names: patterns of a field's beginning, and what the route calls it; the first that fits counts.
        """
        if self.param is None:
            return self
        for pattern, name in names:
            param, found = pattern.subn(name, self.param, count=1)
            if found:
                message = self.message
                if message.startswith(self.param):
                    message = param + message[len(self.param) :]
                return ApiError(
                    self.status,
                    message,
                    param=param,
                    code=self.code,
                    retry_after=self.retry_after,
                    anthropic=self.anthropic,
                )
        return self


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def field_names(names: Mapping[str, str]) -> Names:
    """From patterns as text; the first that fits counts."""
    return tuple((re.compile(old), new) for old, new in names.items())


@contextlib.contextmanager
def renaming(names: Names) -> Iterator[None]:
    """Errors of the context speak of a route's own fields."""
    try:
        yield
    except (ApiError, RequestError) as error:
        raise to_api_error(error).renamed(names) from None


def to_api_error(exc: Exception) -> ApiError:
    """The answer for any exception. What is not the user's to know is logged and called internal."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, PegaError) and type(exc).__name__ in _KINDS:
        return _of_kind(*error_fields(exc))
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
