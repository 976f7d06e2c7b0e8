"""The engine as a real process: what signals and a lost front do to it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import EXIT_OK
from pegainfer.contract.event import FinishReason, TokenEvent
from tests.null.engine.harness import request
from tests.null.engine.test_process import Front

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0
CONTEXT = 4096  # tokens of the null device's default


class Child:
    """An engine process with a front connected to it."""

    def __init__(self, folder: Path, step_seconds: float) -> None:
        folder.chmod(0o700)
        path = folder / "e.sock"
        command = [sys.executable, "-m", "tests.e2e.engine.child", os.fspath(path), str(step_seconds)]
        self.process = subprocess.Popen(command, cwd=ROOT)
        self.front = self._connect(path)
        assert isinstance(self.front.receive(), codec.Ready)

    def _connect(self, path: Path) -> Front:
        while True:
            try:
                return Front(path)
            except (FileNotFoundError, ConnectionRefusedError):
                # The socket appears when the child has started; that it ends instead is a failure.
                with pytest.raises(subprocess.TimeoutExpired):
                    self.process.wait(0.02)

    def events(self) -> list[TokenEvent]:
        """Everything that comes until the engine hangs up."""
        out: list[TokenEvent] = []
        while (message := self.front.receive()) is not None:
            if isinstance(message, codec.Events):
                out += message.events
        return out

    def start_request(self, max_tokens: int | None) -> None:
        """Submits, and returns when its first token is here."""
        self.front.send(codec.Submit(request("r", [65, 66, 67], max_tokens=max_tokens, eos=())))
        while True:
            message = self.front.receive()
            assert message is not None
            if isinstance(message, codec.Events) and message.events:
                return

    def wait_until_it_refuses(self) -> None:
        """Submits short requests until one is refused: a signal may take effect after a few of them."""
        for number in itertools.count():
            late = f"late{number}"
            self.front.send(codec.Submit(request(late, [65], max_tokens=1, eos=())))
            while True:
                message = self.front.receive()
                assert message is not None, "the engine hung up"
                if isinstance(message, codec.Refused):
                    return
                if isinstance(message, codec.Events) and any(
                    e.request_id == late and e.finish is not None for e in message.events
                ):
                    break

    def end(self) -> int:
        return self.process.wait(PATIENCE)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    out: list[Child] = []
    yield out
    for child in out:
        child.front.close()
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait(PATIENCE)


def start(children: list[Child], folder: Path, step_seconds: float = 0.0) -> Child:
    children.append(Child(folder, step_seconds))
    return children[-1]


def test_sigterm_lets_running_requests_finish(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, step_seconds=0.005)
    child.start_request(max_tokens=100)
    child.process.send_signal(signal.SIGTERM)
    events = child.events()
    assert events[-1].finish is FinishReason.LENGTH
    assert 1 + sum(len(e.tokens) for e in events) == 100
    assert child.end() == EXIT_OK


def test_a_second_sigterm_aborts(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, step_seconds=0.02)
    child.start_request(max_tokens=None)
    child.process.send_signal(signal.SIGTERM)
    child.wait_until_it_refuses()
    child.process.send_signal(signal.SIGTERM)
    events = child.events()
    assert events[-1].finish is FinishReason.ABORT
    assert sum(len(e.tokens) for e in events) < CONTEXT - 3
    assert child.end() == EXIT_OK


def test_sigterm_ends_an_idle_engine(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path)
    child.process.send_signal(signal.SIGTERM)
    assert child.events() == []
    assert child.end() == EXIT_OK


def test_sigterm_after_a_drain_ends_the_engine(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path)
    child.front.send(codec.Drain())
    child.wait_until_it_refuses()
    child.process.send_signal(signal.SIGTERM)
    assert child.events() == []
    assert child.end() == EXIT_OK


def test_sigint_is_the_fronts_affair(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, step_seconds=0.002)
    child.start_request(max_tokens=50)
    child.process.send_signal(signal.SIGINT)
    assert len([t for e in child.front.events_of("r") for t in e.tokens]) == 49
    child.front.send(codec.Shutdown())
    assert child.end() == EXIT_OK


def test_the_process_ends_when_the_front_is_gone(children: list[Child], tmp_path: Path) -> None:
    child = start(children, tmp_path, step_seconds=0.02)
    child.start_request(max_tokens=None)
    child.front.close()
    assert child.end() == EXIT_OK
    assert not (tmp_path / "e.sock").exists()
