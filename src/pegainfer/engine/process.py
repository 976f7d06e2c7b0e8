"""The engine as a process of its own: one front, one Unix socket, frames of contract.codec.

    main thread     reads frames; ends the process when the front hangs up
    engine thread   EngineLoop; hands each step's events to the writer
    writer thread   encodes and sends, so that a slow front never stalls a step
    watchdog        logs where the engine stands when it makes no step

SIGTERM drains: what runs is finished and sent, then the process ends; a second SIGTERM aborts. SIGINT is the
front's affair: a terminal sends it to both.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pegainfer.contract import codec
from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USER,
    EngineDeadError,
    PegaError,
    error_fields,
)
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.frames import FrameReader
from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.peers import PeerSide
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Runner, RunnerInfo, StepPolicy, Tracer
from pegainfer.contract.trace import OpTimes, StepTrace
from pegainfer.engine.channel import Writer, accept, listen
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.loop import EngineLoop
from pegainfer.engine.scheduler import Scheduler
from pegainfer.engine.watchdog import watching

log = logging.getLogger(__name__)

CONNECT_SECONDS = 60.0  # a front that has not connected by then will not
READ_BYTES = 1 << 18


def serve_engine(
    build: Callable[[], tuple[Runner, EngineInfo]],
    socket_path: str | Path,
    config: SchedulerConfig | None = None,
    *,
    make_policy: Callable[[RunnerInfo, SchedulerConfig], StepPolicy] = Scheduler,
    tracer: Tracer | None = None,
    grammars: Callable[[EngineInfo], GrammarFactory] | None = None,
    op_times: OpTimes | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    peers: Callable[[], PeerSide | None] = lambda: None,
) -> int:
    """Builds an engine and serves one front until that hangs up or asks for the end; returns the exit code.

    The socket listens before `build` starts, so that the front may connect at once; Ready follows when the
    engine can serve. If `build` or the policy raises PegaError, Failed carries its message.

    Args:
        op_times: of the runner's device, for traces.
        peers: gives the connections to other engines once the engine is built.
        grammars: makes the factory of matchers once the engine is built; None: grammars are refused.

    Raises ConfigError where the socket cannot be made.
    """
    config = config or SchedulerConfig()
    with listen(Path(socket_path)) as listener:
        try:
            runner, info = build()
            policy = make_policy(runner.info, config)
        except Exception as error:
            ours = isinstance(error, PegaError)  # the front prints these on one line; others are our bugs
            if not ours:
                log.exception("the engine failed to start")
            text = str(error) if ours else f"the engine failed to start: {type(error).__name__}"
            with contextlib.suppress(TimeoutError, OSError), accept(listener, connect_seconds) as front:
                front.sendall(codec.encode_frame(codec.Failed(text, user_error=ours)))
            return EXIT_USER if ours else EXIT_FAILED
        try:
            front = accept(listener, connect_seconds)
        except TimeoutError:
            log.error("no front connected within %g s", connect_seconds)
            runner.close()
            return EXIT_FAILED
    # What was built stays for good: the collector need not look at it again. A process may start without it.
    gc.collect()
    gc.freeze()
    gc.enable()
    with front:
        server = _Server(
            front, runner, info, policy, tracer, grammars and grammars(info), config, op_times, peers()
        )
        return server.run(config.watchdog_seconds)


@contextlib.contextmanager
def _term_pipe() -> Iterator[int]:
    """A pipe that gets one byte a SIGTERM; SIGINT is ignored meanwhile.

    Python's own handlers run between any two bytecodes, so that one that takes a lock could wait for itself.
    Outside of the main thread no signal can be caught, and the pipe stays empty.
    """
    reader, writer = os.pipe()
    try:
        if threading.current_thread() is not threading.main_thread():
            yield reader
            return
        os.set_blocking(writer, False)
        old_fd = signal.set_wakeup_fd(writer)
        old_term = signal.signal(signal.SIGTERM, lambda number, frame: None)
        old_int = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield reader
        finally:
            signal.signal(signal.SIGINT, old_int)
            signal.signal(signal.SIGTERM, old_term)
            signal.set_wakeup_fd(old_fd)
    finally:
        os.close(reader)
        os.close(writer)


class _Server:
    """One front's connection: the loop's sink on one side, the frames on the other."""

    def __init__(
        self,
        front: socket.socket,
        runner: Runner,
        info: EngineInfo,
        policy: StepPolicy,
        tracer: Tracer | None,
        grammars: GrammarFactory | None,
        config: SchedulerConfig,
        op_times: OpTimes | None,
        peers: PeerSide | None,
    ) -> None:
        self._front = front
        self._info = info
        self._writer = Writer(front)
        self._loop = EngineLoop(
            runner, policy, self, tracer=tracer, grammars=grammars, max_wait=config.max_wait_seconds,
            op_times=op_times, peers=peers,
        )  # fmt: skip
        self._code = EXIT_OK
        self._terms = 0

    def run(self, watchdog_seconds: float) -> int:
        """Serves until the front hangs up, asks for the end, or the engine is drained or dead."""
        try:
            with _term_pipe() as terms, watching(self._loop.progress, watchdog_seconds):
                self._writer.put(codec.Ready(self._info))  # before any snapshot
                self._loop.start()
                self._read(terms)
        except (PegaError, msgspec.DecodeError) as error:
            log.error("the front sent a broken frame: %s", error)
            self._writer.put(codec.Failed("a broken frame came from the front", user_error=False))
            self._code = EXIT_FAILED
        finally:
            self._loop.close()
            self._writer.close()
        return self._code

    def _read(self, terms: int) -> None:
        """Obeys frames, and SIGTERMs from the pipe `terms`, until the stream ends."""
        frames = FrameReader(codec.MAX_FRAME)
        while True:
            readable, _, _ = select.select([self._front.fileno(), terms], [], [])
            # Asked again: a signal that came while the front's bytes woke the thread shows only afterwards.
            if select.select([terms], [], [], 0)[0] and not self._term(len(os.read(terms, 16))):
                return
            if self._front.fileno() not in readable:
                continue
            try:
                data = self._front.recv(READ_BYTES)
            except ConnectionError:
                return
            if not data:
                return
            for body in frames.feed(data):
                message = codec.decode_to_engine(body)
                if isinstance(message, codec.Shutdown):
                    return
                self._obey(message)

    def _term(self, count: int) -> bool:
        """SIGTERM came `count` times; False if the process shall end now."""
        self._terms += count
        if self._terms > 1:
            return False
        self._loop.drain()
        return not self._loop.wait_drained(0)

    def _obey(self, message: codec.Submit | codec.Cancel | codec.Drain | codec.Trace | codec.Call) -> None:
        match message:
            case codec.Submit(request=request):
                try:
                    self._loop.submit(request)
                except EngineDeadError as error:
                    self.refused(request, error)
            case codec.Cancel(request_id=request_id, index=index):
                self._loop.cancel(request_id, index)
            case codec.Drain():
                self._loop.drain()
            case codec.Trace(on=on):
                self._loop.trace(on)
            case _:
                try:
                    self._loop.call(message)
                except EngineDeadError as error:
                    self.done(message.call, error)

    def _hang_up(self) -> None:
        """Lets the reader return; what was put is still sent."""
        with contextlib.suppress(OSError):
            self._front.shutdown(socket.SHUT_RD)

    # The loop's sink, on the engine's thread

    def events(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        self._writer.put(codec.Events(events, stats))

    def refused(self, request: GenerateRequest, error: PegaError) -> None:
        self._writer.put(codec.Refused(request.id, *error_fields(error)))

    def adapters_changed(self, adapters: list[AdapterInfo]) -> None:
        self._writer.put(codec.Adapters(adapters))

    def done(self, call: int, error: PegaError | None) -> None:
        self._writer.put(codec.Done(call) if error is None else codec.Done(call, *error_fields(error)))

    def steps(self, steps: list[StepTrace]) -> None:
        self._writer.put(codec.Steps(steps))

    def drained(self) -> None:
        if self._terms:
            self._hang_up()

    def dead(self, error: EngineDeadError) -> None:
        self._code = EXIT_FAILED
        self._writer.put(codec.Failed(str(error), user_error=False))
        self._hang_up()
