"""The engine behind a real Unix socket, served on a thread; signals and exits are in tests/e2e."""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegainfer.contract import codec
from pegainfer.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USER,
    ConfigError,
    EngineDeadError,
    ModelFileError,
)
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.frames import HEADER_BYTES, body_length, frame_of
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.step import Runner, StepResult
from pegainfer.engine.channel import listen
from pegainfer.engine.process import serve_engine
from pegainfer.engine.scheduler import SchedulerConfig
from pegainfer.null.pending import NullPending
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import EOS, MODEL, null_config, request
from tests.null.engine.test_inprocess import INFO, PATIENCE

Build = Callable[[], tuple[Runner, EngineInfo]]


class Front:
    """A blocking client that speaks frames."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(os.fspath(path))
        self._file = self.socket.makefile("rb")

    def send(self, message: codec.ToEngine) -> None:
        self.socket.sendall(codec.encode_frame(message))

    def receive(self) -> codec.ToFront | None:
        """The next message; None where the engine has hung up."""
        header = self._file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            return None
        return codec.decode_to_front(self._file.read(body_length(header)))

    def events_of(self, *request_ids: str) -> list[TokenEvent]:
        """Reads until each of these requests (of one index) has its finish."""
        open_ids, out = set(request_ids), []
        while open_ids:
            message = self.receive()
            assert message is not None, "the engine hung up"
            if isinstance(message, codec.Events):
                out += message.events
                open_ids -= {e.request_id for e in message.events if e.finish is not None}
        return out

    def receive_call(self) -> codec.Adapters | codec.Done:
        """The next message about a call; events and statistics in between are skipped."""
        while True:
            message = self.receive()
            if not isinstance(message, codec.Events):
                assert isinstance(message, codec.Adapters | codec.Done)
                return message

    def close(self) -> None:
        self._file.close()
        self.socket.close()


class Served:
    """An engine that is served on a thread, and a front that is connected to it."""

    def __init__(self, folder: Path, build: Build, config: SchedulerConfig | None = None) -> None:
        self.path = folder / "engine.sock"
        self.code: int | None = None
        listening = threading.Event()

        def announced() -> tuple[Runner, EngineInfo]:
            listening.set()  # serve_engine listens before it builds
            return build()

        def serve() -> None:
            self.code = serve_engine(announced, self.path, config, connect_seconds=PATIENCE)

        self.thread = threading.Thread(target=serve)
        self.thread.start()
        assert listening.wait(PATIENCE)
        self.front = Front(self.path)

    def end(self) -> int | None:
        self.thread.join(PATIENCE)
        self.front.close()
        return self.code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    engine = Served(folder, lambda: (NullRunner(null_config()), INFO))
    assert engine.front.receive() == codec.Ready(INFO)
    yield engine
    engine.front.close()
    engine.end()


def test_a_request_is_answered_over_the_socket(served: Served) -> None:
    req = request("r", [1, 2, 3])
    served.front.send(codec.Submit(req))
    events = served.front.events_of("r")
    expected = MODEL.continuation([1, 2, 3], req.sampling, 7, eos_token_ids=(EOS,), max_model_len=64)
    assert [t for e in events for t in e.tokens] == expected


def test_a_frame_holds_the_events_of_one_step(folder: Path) -> None:
    # Steps take so long that the second request joins while the first one runs.
    engine = Served(folder, lambda: (NullRunner(null_config(step_seconds=0.005)), INFO))
    for name in "ab":
        engine.front.send(codec.Submit(request(name, [1, 2], max_tokens=40, eos=())))
    assert engine.front.receive() == codec.Ready(INFO)
    frames: list[list[TokenEvent]] = []
    while sum(map(len, frames)) < 80:
        message = engine.front.receive()
        assert isinstance(message, codec.Events)
        frames.append(message.events)
    # A step commits at most one token a sequence, so no frame may name one twice.
    for events in frames:
        names = [e.request_id for e in events]
        assert len(names) == len(set(names))
    assert any(len(events) == 2 for events in frames)
    engine.front.send(codec.Shutdown())
    assert engine.end() == EXIT_OK


def test_frames_may_come_in_pieces(served: Served) -> None:
    frame = codec.encode_frame(codec.Submit(request("r", [1, 2, 3], max_tokens=2, eos=())))
    for byte in frame:
        served.front.socket.sendall(bytes([byte]))
    assert len(served.front.events_of("r")) == 2


def test_a_refusal_names_exception_and_field(served: Served) -> None:
    served.front.send(codec.Submit(request("r", [99])))
    message = served.front.receive()
    while isinstance(message, codec.Events):  # a snapshot may come first
        message = served.front.receive()
    assert isinstance(message, codec.Refused)
    assert (message.request_id, message.kind, message.param) == ("r", "RequestError", "prompt")
    assert "expected 0..31" in message.message


class Stuck(NullRunner):
    """Its steps end when they are let go."""

    def __init__(self) -> None:
        super().__init__(null_config())
        self.let_go = threading.Event()

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> NullPending:
        pending = super().sample(handle, masks)
        end = pending.wait

        def wait() -> StepResult:
            assert self.let_go.wait(PATIENCE)
            return end()

        pending.wait = wait  # type: ignore[method-assign]
        return pending


def test_an_engine_that_stands_still_is_reported(folder: Path) -> None:
    runner, said, told = Stuck(), list[str](), threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            told.set()

    listener = Listener()
    logger = logging.getLogger("pegainfer.engine.watchdog")
    logger.addHandler(listener)
    try:
        engine = Served(folder, lambda: (runner, INFO), SchedulerConfig(watchdog_seconds=0.05))
        engine.front.send(codec.Submit(request("r", [1, 2, 3], max_tokens=2, eos=())))
        assert told.wait(PATIENCE)
        runner.let_go.set()
        assert engine.front.events_of("r")[-1].finish is FinishReason.LENGTH
        engine.front.send(codec.Shutdown())
        assert engine.end() == EXIT_OK
    finally:
        logger.removeHandler(listener)
    assert "its last plan: step 1, 1 rows, 3 tokens" in said[0] or "its last plan: step 2" in said[0]
    assert "thread engine:" in said[0] and "in wait" in said[0]


def test_cancel_over_the_socket(folder: Path) -> None:
    engine = Served(folder, lambda: (NullRunner(null_config(step_seconds=0.002)), INFO))
    engine.front.send(codec.Submit(request("r", [1, 2, 3], max_tokens=60, eos=())))
    engine.front.send(codec.Cancel("r"))
    assert engine.front.events_of("r")[-1].finish is FinishReason.ABORT
    engine.front.send(codec.Shutdown())
    assert engine.end() == EXIT_OK


def test_cancel_of_one_index_over_the_socket(folder: Path) -> None:
    engine = Served(folder, lambda: (NullRunner(null_config(step_seconds=0.002)), INFO))
    engine.front.send(codec.Submit(request("r", [1, 2, 3], n=2, max_tokens=60, eos=())))
    engine.front.send(codec.Cancel("r", 1))
    finishes: dict[int, FinishReason] = {}
    while len(finishes) < 2:
        message = engine.front.receive()
        if not isinstance(message, codec.Events):
            continue
        finishes |= {e.index: e.finish for e in message.events if e.finish is not None}
    assert finishes == {0: FinishReason.LENGTH, 1: FinishReason.ABORT}
    engine.front.send(codec.Shutdown())
    assert engine.end() == EXIT_OK


def test_drain_then_shutdown(served: Served) -> None:
    served.front.send(codec.Submit(request("old", [1, 2, 3], max_tokens=9, eos=())))
    served.front.send(codec.Drain())
    served.front.send(codec.Submit(request("new", [1, 2, 3])))
    seen: list[codec.ToFront | None] = []
    while not any(isinstance(m, codec.Refused) for m in seen) or not any(
        e.finish for m in seen if isinstance(m, codec.Events) for e in m.events
    ):
        seen.append(served.front.receive())
    (refused,) = [m for m in seen if isinstance(m, codec.Refused)]
    assert (refused.request_id, refused.kind) == ("new", "QueueFullError")
    assert refused.retry_after > 0
    served.front.send(codec.Shutdown())
    assert served.end() == EXIT_OK


def test_a_snapshot_of_an_idle_engine_arrives(served: Served) -> None:
    served.front.send(codec.Submit(request("r", [1, 2, 3], max_tokens=2, eos=())))
    while True:
        message = served.front.receive()
        assert isinstance(message, codec.Events)
        if message.stats and message.stats.steps and not message.stats.in_flight:
            assert message.stats.generation_tokens == 2
            return


def test_the_engine_ends_when_the_front_goes_away(folder: Path) -> None:
    runner = NullRunner(null_config(step_seconds=0.001))
    engine = Served(folder, lambda: (runner, INFO))
    engine.front.send(codec.Submit(request("r", [1, 2, 3], max_tokens=60, eos=())))
    engine.front.receive()
    engine.front.close()
    assert engine.end() == EXIT_OK
    assert runner.closed


def test_a_front_may_hang_up_while_the_engine_starts(folder: Path) -> None:
    gone = threading.Event()

    def build() -> tuple[Runner, EngineInfo]:
        assert gone.wait(PATIENCE)
        return NullRunner(null_config()), INFO

    engine = Served(folder, build)
    engine.front.close()
    gone.set()
    assert engine.end() == EXIT_OK


@pytest.mark.parametrize(
    ("error", "message", "user_error", "code"),
    [
        (ModelFileError("truncated", where="w.gguf"), "truncated; at w.gguf", True, EXIT_USER),
        (ValueError("inner detail"), "the engine failed to start: ValueError", False, EXIT_FAILED),
    ],
)
def test_an_engine_that_cannot_start_says_why(
    folder: Path, error: Exception, message: str, user_error: bool, code: int
) -> None:
    def build() -> tuple[Runner, EngineInfo]:
        raise error

    engine = Served(folder, build)
    assert engine.front.receive() == codec.Failed(message, user_error=user_error)
    assert engine.front.receive() is None
    assert engine.end() == code


def test_nobody_connects(folder: Path) -> None:
    runner = NullRunner(null_config())
    code = serve_engine(lambda: (runner, INFO), folder / "e.sock", connect_seconds=0.01)
    assert (code, runner.closed) == (EXIT_FAILED, True)


@pytest.mark.parametrize("garbage", [b"\xff" * HEADER_BYTES, frame_of(b"\xc1abcd")])
def test_a_broken_frame_ends_the_engine(served: Served, garbage: bytes) -> None:
    served.front.socket.sendall(garbage)
    message = served.front.receive()
    while isinstance(message, codec.Events):
        message = served.front.receive()
    assert isinstance(message, codec.Failed) and not message.user_error
    assert served.end() == EXIT_FAILED


def test_a_dead_engine_says_so(folder: Path) -> None:
    config = null_config(faults=lambda plan: EngineDeadError("the device is lost"))
    engine = Served(folder, lambda: (NullRunner(config), INFO))
    engine.front.send(codec.Submit(request("r", [1, 2, 3])))
    seen: list[codec.ToFront] = []
    while (message := engine.front.receive()) is not None:
        seen.append(message)
    assert isinstance(seen[-1], codec.Failed)
    assert "the device is lost" in seen[-1].message and not seen[-1].user_error
    finishes = [e for m in seen if isinstance(m, codec.Events) for e in m.events if e.finish]
    assert [e.error_kind for e in finishes] == ["EngineDeadError"]
    assert engine.end() == EXIT_FAILED


def test_the_socket_is_private_and_goes_away(folder: Path) -> None:
    path = folder / "deep" / "e.sock"
    with listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_sockets_that_cannot_be_made(folder: Path) -> None:
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match="open to others"), listen(open_folder / "e.sock"):
        pass
    with pytest.raises(ConfigError, match="too long"), listen(folder / ("x" * 120)):
        pass
    (folder / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot make"), listen(folder / "taken"):
        pass
    assert (folder / "taken").exists()  # what was there before is left alone


def test_adapters_are_loaded_and_unloaded_over_the_socket(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "adapter"
    file.write_text("content")
    engine = Served(folder, lambda: (NullRunner(null_config(max_adapters=1)), INFO))
    front = engine.front
    assert front.receive() == codec.Ready(INFO)
    front.send(codec.LoadAdapter(3, "a", str(file)))
    message = front.receive_call()
    assert isinstance(message, codec.Adapters)
    (adapter,) = message.adapters
    assert (adapter.name, adapter.path, len(adapter.digest)) == ("a", str(file), 32)
    assert front.receive_call() == codec.Done(3)
    req = request("r", [1, 2, 3], adapter="a")
    front.send(codec.Submit(req))
    expected = MODEL.continuation(
        [1, 2, 3],
        req.sampling,
        7,
        eos_token_ids=(EOS,),
        max_model_len=64,
        adapter_digest=adapter.digest,
    )
    assert [t for e in front.events_of("r") for t in e.tokens] == expected
    front.send(codec.UnloadAdapter(4, "b"))
    message = front.receive_call()
    assert isinstance(message, codec.Done)
    assert (message.call, message.kind, message.param) == (4, "RequestError", "lora_name")
    front.send(codec.UnloadAdapter(5, "a"))
    assert front.receive_call() == codec.Adapters([])
    assert front.receive_call() == codec.Done(5)
    front.send(codec.ResetPrefixCache(6))
    assert front.receive_call() == codec.Done(6)
    front.send(codec.Shutdown())
    assert engine.end() == EXIT_OK
