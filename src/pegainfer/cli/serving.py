"""The two processes of `serve`: the engine's is started first, the front loads beside it, then they serve.

engine process started ─► model read and packed ──────────────┐
        └─► web stack and tokenizer loaded here meanwhile ────┴─► ready, listening
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pegainfer import __version__
from pegainfer.app.observers import observing
from pegainfer.cli.machine import process_age
from pegainfer.cli.running import Note, noted
from pegainfer.cli.supervisor import Supervisor, supervised
from pegainfer.cli.target import Target, load_text_side
from pegainfer.contract.observation import Observer
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.server import run_loop

if TYPE_CHECKING:
    from pegainfer.app.text import TextSide
    from pegainfer.contract.handle import EngineInfo


A = TypeVar("A")
B = TypeVar("B")


def run_server_processes(target: Target, http: HttpConfig, listener: socket.socket) -> int:
    """Starts the engine, serves until a signal ends it, and returns the exit code.

    Raises what loading the model raises, and EngineDeadError where the engine process ends by itself.
    """
    folder = _trace_folder(http.trace)
    with (
        observing(http.access_log, http.otlp_traces_endpoint) as observers,
        noted() as note,
        supervised(target.spec, http.engine_restarts) as supervisor,
    ):
        return run_loop(_run(target, http, listener, supervisor, observers, note, folder))


def _trace_folder(path: str) -> Path | None:
    if not path:
        return None
    from pegainfer.observe.trace import open_folder

    return open_folder(path)


async def _run(
    target: Target,
    http: HttpConfig,
    listener: socket.socket,
    supervisor: Supervisor,
    observers: Sequence[Observer],
    note: Note,
    folder: Path | None,
) -> int:
    """From two processes that load to a served app, and down again. Returns the exit code.

    Args:
        folder: for the trace; None: none is taken but on demand.
    """
    text = asyncio.ensure_future(asyncio.to_thread(_timed_text_side, target))
    from pegainfer.frontend.adapter_calls import load_modules
    from pegainfer.frontend.http.app import create_app
    from pegainfer.frontend.http.connection.server import preload, run_server
    from pegainfer.frontend.supervised import SupervisedEngine
    from pegainfer.observe.trace import RingBuffer

    preload()
    client, (side, text_seconds) = await both(asyncio.ensure_future(supervisor.connect()), text)
    engine = SupervisedEngine(client)
    buffer = RingBuffer(client.info.model, client.info.device)
    app = create_app(
        engine, side.tokenizer, side.template, http, generation=side.generation, pooling=side.pooling,
        observers=observers, buffer=buffer,
    )  # fmt: skip
    await load_modules(engine, http.lora_modules, app.front.names)
    tracing = app.front.tracing
    if tracing is not None and folder is not None:
        tracing.start()
    watching = asyncio.ensure_future(supervisor.keep_alive(engine))
    info = client.info
    lines = _startup_lines(info, text_seconds)

    def on_ready(url: str) -> None:
        note.write(url, app.front.names, info.device, info.max_model_len)
        print(*lines, *ready_lines(url, http), sep="\n", flush=True)

    code = await run_server(app, [listener], http, on_ready=on_ready)
    watching.cancel()
    if tracing is not None and folder is not None:
        await tracing.stop()
        print(f"trace written to {buffer.write(folder)}", flush=True)
    engine.close()
    await supervisor.check_end()
    return code


async def both(connecting: asyncio.Future[A], text: asyncio.Future[B]) -> tuple[A, B]:
    """Both results; raises what fails first."""
    both = asyncio.gather(connecting, text)
    both.add_done_callback(lambda f: f.cancelled() or f.exception())  # seen, also where we are interrupted
    try:
        return await both
    finally:
        both.cancel()


def _timed_text_side(target: Target) -> tuple[TextSide, float]:
    started = time.perf_counter()
    side = load_text_side(target)
    return side, time.perf_counter() - started


def ready_lines(url: str, http: HttpConfig) -> list[str]:
    """Where it listens, and what a browser finds there."""
    page = "open it in a browser to talk to the model; /dashboard shows what the server does"
    return [f"listening on {url}", *([page] if http.page_is_open else [])]


def _startup_lines(info: EngineInfo, text_seconds: float) -> list[str]:
    """What was started and how long its phases took, the engine's beside the front's."""
    phases = {**{f"engine {name}": s for name, s in info.startup_seconds.items()}, "tokenizer": text_seconds}
    took = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    return [
        f"pegainfer {__version__}: {info.model} on {info.device}, {info.max_slots} sequences of up to "
        f"{info.max_model_len} tokens",
        f"ready after {process_age():.2f} s ({took})",
    ]
