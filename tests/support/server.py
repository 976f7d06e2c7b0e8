"""A real server process for end-to-end tests: `pegainfer serve` on a free port of the loopback."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil

START_SECONDS = 60.0
LISTENING = re.compile(r"listening on (http://\S+)")


class ServerProcess:
    """`url` is set once it listens."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "pegainfer.cli.main", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.url = ""
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._threads = [
            threading.Thread(
                target=self._read, args=(self.process.stdout, self.lines, self._queue), daemon=True
            ),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors, None), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(stream: object, into: list[str], wake: queue.Queue[str | None] | None) -> None:
        for line in stream:  # type: ignore[attr-defined]
            into.append(line)
            if wake is not None:
                wake.put(line)
        if wake is not None:
            wake.put(None)

    def wait_listening(self) -> None:
        """Raises AssertionError with the process's output where it ends instead."""
        while (line := self._queue.get(timeout=START_SECONDS)) is not None:
            if match := LISTENING.search(line):
                self.url = match[1]
                return
        self.process.wait(START_SECONDS)
        raise AssertionError(f"the server ended with {self.process.returncode}: {''.join(self.errors)}")

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once it has ended and all its output is here."""
        code = self.process.wait(START_SECONDS)
        for thread in self._threads:
            thread.join(START_SECONDS)
        return code


@contextlib.contextmanager
def running_server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server that listens; it has ended when the context does."""
    server = ServerProcess(*arguments, env=env)
    try:
        server.wait_listening()
        yield server
    finally:
        if server.process.poll() is None:
            server.terminate()
            try:
                server.wait()
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.wait()
