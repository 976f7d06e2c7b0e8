"""The engine's process: started, watched, and once it has died replaced as often as is allowed.

start ─► connect ─► serving ─► died ─► in flight: failed with the reason ─► start … ─► replaced
                       │        └─ no restart left, or the new one cannot start: the server ends
                       └─ ended by itself with 0: it was asked to, the server ends too
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegainfer.cli.engine_child import take_child
from pegainfer.cli.interrupts import uninterrupted
from pegainfer.cli.socket_folder import socket_folder
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import EngineDeadError, PegaError

if TYPE_CHECKING:
    from pegainfer.frontend.engine_client import EngineClient
    from pegainfer.frontend.supervised import SupervisedEngine

log = logging.getLogger(__name__)

START_SECONDS = 600.0  # for the largest models from a cold disk
END_SECONDS = 10.0  # for the engine process to end once it was asked to
REASON_SECONDS = 0.5  # for a process whose socket has closed to end, so that it is known how


@contextlib.contextmanager
def supervised(spec: EngineSpec, restarts: int) -> Iterator[Supervisor]:
    """An engine process that is started now and has ended when the context has.

    Until a server has its own handlers, SIGTERM is an exception here, so that the engine is ended too.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    supervisor = Supervisor(spec, restarts)
    try:
        supervisor.start()
        yield supervisor
    finally:
        with uninterrupted():
            supervisor.stop()


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


class Supervisor:
    """One engine process at a time. `stop` it at the end; all other methods belong to one event loop."""

    def __init__(self, spec: EngineSpec, restarts: int) -> None:
        self._spec = spec
        self._restarts = restarts  # that are left
        self._starting = True  # the process of the moment has served nobody
        self._irreplaceable = False  # the engine is gone, and there could be no other
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._ended: asyncio.Future[int] | None = None

    def start(self) -> None:
        """Takes the process that waits, or a new one; it makes its socket in time. Needs no event loop."""
        self._folder = socket_folder()
        self._ended = None
        self._starting = True
        child = take_child()
        self._process = child.process
        child.order(str(self._folder / "engine.sock"), self._spec)

    def stop(self) -> None:
        """The process has ended when this returns. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def ended(self) -> asyncio.Future[int]:
        """Of the process of the moment: its return code, once there is one."""
        assert self._process is not None
        if self._ended is None:
            self._ended = asyncio.ensure_future(_wait(self._process))
        return self._ended

    async def connect(self) -> EngineClient:
        """The client of the process of the moment, when it is ready.

        Raises EngineDeadError where the process ends instead, and what EngineClient.connect raises.
        """
        from pegainfer.frontend.engine_client import EngineClient

        assert self._folder is not None
        path = str(self._folder / "engine.sock")
        connecting = asyncio.ensure_future(
            EngineClient.connect(path, timeout=START_SECONDS, explain=self.explain)
        )
        connecting.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, also if interrupted
        try:
            either: list[asyncio.Future[Any]] = [connecting, self.ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                # The engine has ended; if it could say why, that is on its way through the socket.
                await asyncio.wait({connecting}, timeout=1.0)
            if not connecting.done():
                how = describe_end(self.ended.result())
                raise EngineDeadError("the engine process ended before it was ready", got=how)
            client = await connecting
        finally:
            connecting.cancel()
        self._starting = False
        self._forget_folder()  # connected: were we killed, nothing would be left behind
        return client

    async def explain(self) -> EngineDeadError:
        """How the process of the moment ended, and what follows from it."""
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(asyncio.shield(self.ended), REASON_SECONDS)
            another = self._restarts and not self._starting
            remedy = "try again when a new one is ready" if another else "restart the server"
            return EngineDeadError("the engine process has ended", got=describe_end(code), remedy=remedy)
        return EngineDeadError("the engine process has closed its connection")

    async def keep_alive(self, engine: SupervisedEngine) -> None:
        """Replaces an engine that died; where that is not to be, makes the server end by a SIGTERM."""
        while True:
            await engine.wait_closed()
            reason = await self.explain()
            if self.ended.done() and self.ended.result() == 0:
                break
            log.error("%s", reason)
            if not self._restarts or engine.draining:
                break
            self._restarts -= 1
            try:
                seconds = await self._replace(engine)
            except (PegaError, OSError) as error:
                log.error("a new engine could not be started: %s", error)
                self._irreplaceable = True
                break
            log.warning("a new engine is ready after %.1f s; restarts left: %d", seconds, self._restarts)
        signal.raise_signal(signal.SIGTERM)

    async def _replace(self, engine: SupervisedEngine) -> float:
        """Returns the seconds that it took. Raises PegaError, OSError."""
        started = time.monotonic()
        await asyncio.to_thread(self.stop)
        self.start()
        engine.replace(await self.connect())
        return time.monotonic() - started

    async def check_end(self) -> None:
        """Waits for the process, which was asked to end. Raises EngineDeadError where one has failed.

        One that was to take a dead one's place has served nobody: it is not waited for.
        """
        if self._irreplaceable:
            raise EngineDeadError(
                "the engine process has ended, and no new one could be started", remedy="the log says why"
            )
        if self._starting:
            return
        with contextlib.suppress(TimeoutError):
            # 0 also where the engine got a SIGTERM beside ours, as a service manager sends it to all of us.
            code = await asyncio.wait_for(asyncio.shield(self.ended), END_SECONDS)
            if code != 0:
                how = describe_end(code)
                raise EngineDeadError(
                    "the engine process has failed", got=how, remedy="start the server again"
                )


def describe_end(code: int) -> str:
    """A return code of subprocess in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


async def _wait(process: subprocess.Popen[bytes]) -> int:
    """Waits for a child's end without a thread."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
