"""The exception tree. Every message says what was expected, what was got, where, and the remedy."""

from __future__ import annotations

from typing import NamedTuple

# How a process ends: done; unclean, with requests aborted or a fault of its own; the user can cure it.
EXIT_OK, EXIT_FAILED, EXIT_USER = 0, 1, 2


class PegaError(Exception):
    """Root of all errors that a user can cause or cure. The CLI prints it on one line and exits with 2.

    Args:
        what: one sentence that names the fault.
        expected, got, where, remedy: appended to the message in this order where given.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        got: object = None,
        where: object = None,
        remedy: str | None = None,
    ) -> None:
        self.what = what
        self.remedy = remedy
        parts = [what]
        if expected is not None:
            parts.append(f"expected {expected}")
        if got is not None:
            parts.append(f"got {got}")
        if where is not None:
            parts.append(f"at {where}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class ConfigError(PegaError):
    """A flag, an option or a model configuration that cannot work."""


class ModelFileError(PegaError):
    """A weights, tokenizer or config file that is missing, truncated or contradicts itself."""


class UnsupportedError(PegaError):
    """Asked for something that this build, device or model line does not do."""


class OpError(PegaError):
    """Operands that do not fit an op's declaration; names the op, the tensor, the axis and both sizes."""


class RequestError(PegaError):
    """One request is at fault (HTTP 400). `param` is the field to blame, None for the whole body."""

    def __init__(self, what: str, *, param: str | None = None, **parts: object) -> None:
        self.param = param
        super().__init__(what, **parts)  # type: ignore[arg-type]


class QueueFullError(PegaError):
    """The engine takes no more requests now (HTTP 503). `retry_after` is in seconds."""

    def __init__(self, what: str, *, retry_after: float = 1.0, **parts: object) -> None:
        self.retry_after = retry_after
        super().__init__(what, **parts)  # type: ignore[arg-type]


class DeadlineError(PegaError):
    """A request's deadline passed before it finished (HTTP 504 if nothing was sent yet)."""


class EngineDeadError(PegaError):
    """The engine process or thread has ended; nothing submitted to it will be answered (HTTP 503)."""


class PeerFailedError(EngineDeadError):
    """A rank noticed that another one has failed, whose own error says more."""


class ErrorFields(NamedTuple):
    """A PegaError as it crosses between processes; its parts have become its message."""

    kind: str  # the exception's name
    message: str
    param: str | None  # of a RequestError
    retry_after: float  # seconds, of a QueueFullError


def error_fields(error: PegaError) -> ErrorFields:
    """What `restored_error` needs."""
    return ErrorFields(
        type(error).__name__,
        str(error),
        error.param if isinstance(error, RequestError) else None,
        error.retry_after if isinstance(error, QueueFullError) else 0.0,
    )


def restored_error(
    kind: str | None, message: str, param: str | None = None, retry_after: float = 0.0
) -> PegaError:
    """The exception that crossed; of a kind that is none of this module's, the root of all."""
    found = globals().get(kind or "")
    if found is RequestError:
        return RequestError(message, param=param)
    if found is QueueFullError:
        return QueueFullError(message, retry_after=retry_after)
    if isinstance(found, type) and issubclass(found, PegaError):
        return found(message)
    return PegaError(message)


class InvariantError(AssertionError):
    """A container's `check_integrity()` found a broken invariant: a bug of ours, never of the user."""
