"""The two processes of `serve`: the engine's is started first, the front loads beside it, then they serve.

engine process started ─► model read and packed ──────────────┐
        └─► web stack and tokenizer loaded here meanwhile ────┴─► ready, listening
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pegainfer import __version__
from pegainfer.app.observers import observing
from pegainfer.cli.machine import process_age
from pegainfer.cli.spec import EngineSpec
from pegainfer.cli.target import Target, load_text_side
from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.observation import Observer
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.server import run_loop

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide
    from pegainfer.contract.handle import EngineInfo
    from pegainfer.frontend.engine_client import EngineClient

START_SECONDS = 600.0  # for the largest models from a cold disk
END_SECONDS = 10.0  # for the engine process to end once it was asked to


def run_server_processes(target: Target, http: HttpConfig, listener: socket.socket) -> int:
    """Starts the engine, serves until a signal ends it, and returns the exit code.

    Raises what loading the model raises, and EngineDeadError where the engine process ends by itself.
    """
    # Until the server has its own handlers, SIGTERM is an exception here, so that the engine is ended too.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with (
        observing(http.access_log, http.otlp_traces_endpoint) as observers,
        _engine_process(target.spec) as (process, path),
    ):
        return run_loop(_run(target, http, listener, process, path, observers))


def _exit_on_signal(number: int, frame: object) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def _engine_process(spec: EngineSpec) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The engine's process and the socket that it will make. It has ended when the context ends."""
    with tempfile.TemporaryDirectory(prefix="pegainfer-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "engine.sock"
        command = [sys.executable, "-m", "pegainfer.cli.engine_process", str(path)]
        process = subprocess.Popen(
            [*command, msgspec.json.encode(spec).decode()], stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            yield process, path
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _run(
    target: Target,
    http: HttpConfig,
    listener: socket.socket,
    process: subprocess.Popen[bytes],
    path: Path,
    observers: Sequence[Observer],
) -> int:
    """From two processes that load to a served app, and down again. Returns the exit code."""
    ended = asyncio.ensure_future(_ended(process))
    text = asyncio.ensure_future(asyncio.to_thread(_timed_text_side, target))
    from pegainfer.frontend.engine_client import EngineClient
    from pegainfer.frontend.http.app import create_app
    from pegainfer.frontend.http.server import run_server

    connecting = asyncio.ensure_future(EngineClient.connect(str(path), timeout=START_SECONDS))
    client, (side, text_seconds) = await _first_failure(ended, process, connecting, text)
    shutil.rmtree(path.parent, ignore_errors=True)  # connected: were we killed, nothing would be left behind
    app = create_app(client, side.tokenizer, side.template, http, observers=observers)
    watching = asyncio.ensure_future(_stop_when_closed(client))
    lines = _startup_lines(client.info, text_seconds)
    code = await run_server(
        app, [listener], http, on_ready=lambda url: print(*lines, f"listening on {url}", sep="\n", flush=True)
    )
    watching.cancel()
    client.close()
    with contextlib.suppress(TimeoutError):
        # 0 also where the engine got a SIGTERM beside ours, as a service manager sends it to all processes.
        if await asyncio.wait_for(ended, END_SECONDS) != 0:
            raise EngineDeadError("the engine process has failed", remedy="start the server again")
    return code


async def _first_failure(
    ended: asyncio.Future[int],
    process: subprocess.Popen[bytes],
    connecting: asyncio.Future[EngineClient],
    text: asyncio.Future[tuple[TextSide, float]],
) -> tuple[EngineClient, tuple[TextSide, float]]:
    """Both results; raises what fails first, the engine process's end included."""
    both = asyncio.gather(connecting, text)
    both.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, also where we are interrupted
    either: list[asyncio.Future[Any]] = [both, ended]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not both.done():
            # The engine has ended; if it could say why, that is on its way through the socket.
            await asyncio.wait({both}, timeout=1.0)
        if not both.done():
            raise EngineDeadError(
                "the engine process ended before it was ready", got=f"exit code {process.returncode}"
            )
        return await both
    finally:
        both.cancel()


async def _ended(process: subprocess.Popen[bytes]) -> int:
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


async def _stop_when_closed(client: EngineClient) -> None:
    """An engine that is gone does not come back: the server ends, so that its supervisor starts a new one."""
    await client.wait_closed()
    signal.raise_signal(signal.SIGTERM)


def _timed_text_side(target: Target) -> tuple[TextSide, float]:
    started = time.perf_counter()
    side = load_text_side(target)
    return side, time.perf_counter() - started


def _startup_lines(info: EngineInfo, text_seconds: float) -> list[str]:
    """What was started and how long its phases took, the engine's beside the front's."""
    phases = {**{f"engine {name}": s for name, s in info.startup_seconds.items()}, "tokenizer": text_seconds}
    took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    return [
        f"pegainfer {__version__}: {info.model} on {info.device}, {info.max_slots} sequences of up to "
        f"{info.max_model_len} tokens",
        f"ready after {process_age():.2f} s ({took})",
    ]
