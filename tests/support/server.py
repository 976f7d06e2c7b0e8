"""A real `pegainfer serve` process for tests, on a free port."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLI = [sys.executable, "-m", "pegainfer.cli.main"]
LISTENING = "listening on "
END_SECONDS = 60.0


@dataclass
class Server:
    """A server that listens. `said` is what it printed before."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]
    errors: Path  # its stderr

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def children(self) -> list[int]:
        """Process ids of the server's direct children."""
        return children_of(self.process.pid)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS)


def children_of(pid: int) -> list[int]:
    """Process ids of a process's direct children."""
    found = (task / "children" for task in Path(f"/proc/{pid}/task").iterdir())
    return [int(child) for file in found for child in file.read_text().split()]


@contextlib.contextmanager
def serving(*argv: str, **env: str) -> Iterator[Server]:
    """Starts `pegainfer serve *argv --port 0`, waits until it listens, and has it ended afterwards.

    Variables are added to its environment.

    Raises AssertionError with the server's stderr where it ends instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            command = [*CLI, "serve", *argv, "--port", "0"]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **env}
            )
        try:
            yield _until_listening(process, errors)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _until_listening(process: subprocess.Popen[str], errors: Path) -> Server:
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(LISTENING):
            return Server(process, line.strip().removeprefix(LISTENING), said, errors)
        said.append(line.rstrip("\n"))
    raise AssertionError(f"the server ended with {process.wait()}: {errors.read_text()}")


def pega(*argv: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """One run of the command line, with variables added to the environment."""
    return subprocess.run(
        [*CLI, *argv], input=stdin, capture_output=True, text=True, timeout=300, env={**os.environ, **env}
    )


def pega_here(*argv: str) -> subprocess.CompletedProcess[str]:
    """One run of the command line inside this process: quicker, for commands that keep nothing behind."""
    from pegainfer.cli.main import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(argv)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), errors.getvalue())
