"""One JSON line a request, written by a thread of its own: a slow or full disk costs lines, never answers."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import queue
import sys
import time
from collections.abc import Callable

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.observation import RequestRecord

log = logging.getLogger(__name__)

MAX_QUEUED = 10_000  # lines that wait for the disk
OF_TRACES = ("clock", "timings")  # fields that mean something beside the machine's own clock alone
COMPLAIN_SECONDS = 60.0  # between two complaints about lines that could not be written


class AccessLog:
    """An observer of requests. The file is opened anew when it was moved away, so it can be rotated.

    A line has the fields of RequestRecord that are not at their default, except `error`, in ASCII: what
    could disturb a terminal is escaped. Prompts, answers, keys and queries are never in it.
    """

    def __init__(self, path: str) -> None:
        """`path`: a file to append to, or - for standard output. Raises ConfigError if it does not open."""
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_QUEUED)
        self._lost = 0
        self._complained = -COMPLAIN_SECONDS
        self._handler = _handler(path, self._lose)
        self._listener = _Listener(self._lines, self._handler)
        self._listener.start()

    def __call__(self, record: RequestRecord) -> None:
        fields = msgspec.to_builtins(record)
        for name in OF_TRACES:
            fields.pop(name, None)
        fields.pop("error", None)  # it may quote the request
        line = json.dumps(fields, separators=(",", ":"))
        try:
            self._lines.put_nowait(logging.LogRecord("access", logging.INFO, "", 0, line, (), None))
        except queue.Full:
            self._lose("the disk does not keep up")

    def close(self) -> None:
        """Writes what waits."""
        self._listener.stop()
        with contextlib.suppress(OSError):  # lines that could not be written were counted already
            self._handler.close()

    def _lose(self, why: object) -> None:
        self._lost += 1
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_SECONDS:
            self._complained = now
            log.warning("access log: %d lines lost so far: %s", self._lost, why)


class _Listener(logging.handlers.QueueListener):
    def enqueue_sentinel(self) -> None:
        self.queue.put(self._sentinel)  # type: ignore[attr-defined]  # waits for room, unlike the base's


def _handler(path: str, lose: Callable[[object], None]) -> logging.Handler:
    """Writes lines and tells `lose` of those that it could not."""

    class File(logging.handlers.WatchedFileHandler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                super().emit(record)  # opening anew may fail too
            except OSError:
                self.handleError(record)

        def handleError(self, record: logging.LogRecord) -> None:
            lose(sys.exc_info()[1])

    class Output(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs alone
        def handleError(self, record: logging.LogRecord) -> None:
            lose(sys.exc_info()[1])

    if path == "-":
        return Output(sys.stdout)
    try:
        return File(path, encoding="ascii")
    except OSError as e:
        raise ConfigError(
            f"cannot write the access log: {e.strerror}", where=f"--access-log {path}"
        ) from None
