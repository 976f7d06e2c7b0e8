"""Which observers of requests a server has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pegainfer.contract.observation import Observer
from pegainfer.observe.console import ConsoleLines


@contextlib.contextmanager
def observing(access_log: str, otlp_traces_endpoint: str) -> Iterator[list[Observer]]:
    """The observers, which write what waits when the context ends.

    Args:
        access_log: file, - for standard output, or "" for none.
        otlp_traces_endpoint: URL, or "" for none.

    Raises ConfigError for a file that cannot be opened, a URL that is none, or a package that is missing.
    """
    with contextlib.ExitStack() as stack:
        console = ConsoleLines()
        stack.callback(console.close)
        observers: list[Observer] = [console]
        if access_log:
            from pegainfer.observe.access_log import AccessLog

            lines = AccessLog(access_log)
            stack.callback(lines.close)
            observers.append(lines)
        if otlp_traces_endpoint:
            from pegainfer.observe.spans import to_endpoint

            tracer = to_endpoint(otlp_traces_endpoint)
            stack.callback(tracer.close)
            observers.append(tracer)
        yield observers
