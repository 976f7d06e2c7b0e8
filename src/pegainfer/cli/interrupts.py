"""Ctrl-C at any moment, and as often as one likes, ends a command without a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

EXIT_INTERRUPTED = 130


def quieten_interrupts() -> None:
    """For a process that runs one command: call it first.

    An interrupt that strikes in a callback or destructor is one that nothing can catch, and Python would
    print it and go on. Here it ends the process; an engine's process ends with its parent.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            os._exit(EXIT_INTERRUPTED)
        before(unraisable)

    sys.unraisablehook = hook


def end_by_signal() -> None:
    """From now on Ctrl-C ends the process as the system does. For the interpreter's own end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing until the context ends. For tidying up that takes a bounded time; main thread."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
