"""From a bound socket to a served app, and down again without losing an answer.

bind_socket ──► (load the model) ──► run_server ──► signal: new requests get 503, running ones finish
                                                └─► second signal, or `drain_seconds` passed: they are aborted
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.memory import give_back_when_idle, limit_arenas, spare_the_collector

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pegainfer.frontend.http.answer.registry import Registry
    from pegainfer.frontend.http.observation.metrics import FrontMetrics

CLOSE_SECONDS = 5  # for connections to close once nothing is generated any more
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # by which a user or a service manager ends the process
MAX_FILES = 1 << 16  # open at a time: more connections than one process can serve


class Served(Protocol):
    """An ASGI application that can be drained: App, or FleetApp for several models."""

    @property
    def registry(self) -> Registry: ...

    @property
    def metrics(self) -> FrontMetrics: ...

    @property
    def num_live(self) -> int:
        """Generations that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def refused(self, status: int, client: str, message: str) -> None:
        """Bytes were refused before they became a request."""

    def drain(self) -> None:
        """New generations get 503 from now on; running ones go on."""

    async def idle(self) -> None:
        """Returns once nothing is being generated."""

    def abort_all(self) -> None:
        """Ends every generation."""


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not yet listening. Do this before anything heavy is loaded.

    Raises ConfigError where the address cannot be had.
    """
    where = f"--host {host} --port {port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as e:
        raise ConfigError("unknown host name", got=host, where="--host") from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as e:
        sock.close()
        raise _address_error(e, where) from e
    sock.setblocking(False)
    return sock


def _address_error(e: OSError, where: str) -> ConfigError:
    if e.errno == errno.EADDRINUSE:
        return ConfigError(
            "the port is taken", where=where, remedy="stop its owner, or choose another --port"
        )
    if e.errno == errno.EACCES:
        return ConfigError("no right to listen on this port", where=where, remedy="choose one above 1023")
    if e.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            "no such address on this machine", where=where, remedy="--host 127.0.0.1 or 0.0.0.0"
        )
    return ConfigError("cannot listen", got=e.strerror, where=where)


def address_of(sock: socket.socket, *, tls: bool = False) -> str:
    """The URL at which a bound socket is reached, e.g. 'http://127.0.0.1:8000'."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Runs the main coroutine on uvloop and returns its exit code.

    SIGTERM and SIGINT cancel it, unless it has handlers of its own; the code is then 143 or 130. Once it is
    being cancelled, further signals do nothing: what it does at its end must take a bounded time.
    """
    import uvloop

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signal(main))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _until_signal(main: Coroutine[Any, Any, int]) -> int:
    """The handlers are the loop's own: an exception out of another one would strike in any callback, as in
    that of a socket's bytes, where the loop takes it for the socket's fault and goes on."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    came: list[int] = []

    def on_signal(number: int) -> None:
        came.append(number)
        if len(came) == 1:
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await main
    except asyncio.CancelledError:
        if not came:
            raise
        return 128 + came[0]


def preload() -> None:
    """Imports what `run_server` needs, for who waits for an engine first."""
    import uvicorn  # noqa: F401

    import pegainfer.frontend.http.connection.protocol  # noqa: F401


def announce(url: str) -> None:
    print(f"listening on {url}", flush=True)


async def run_server(
    app: Served,
    sockets: Sequence[socket.socket],
    config: HttpConfig,
    *,
    on_ready: Callable[[str], None] = announce,
) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Owns the sockets and closes them.

    Args:
        app: from `create_app`, or a FleetApp.
        sockets: bound, as `bind_socket` returns them.
        on_ready: called with the first socket's URL once connections are accepted.

    Returns:
        0 after a clean drain, 1 where requests had to be aborted.

    Raises:
        ConfigError: another process took the port after it was bound.
    """
    limit_arenas()
    _allow_connections()
    server = make_server(app, config)
    stop, abort = asyncio.Event(), asyncio.Event()
    tidying = give_back_when_idle(app.registry, app.metrics)
    with _signals(stop, abort), _beside(app.metrics.watch_loop()), _beside(tidying):
        url = address_of(sockets[0], tls=bool(config.ssl_certfile))
        serving = asyncio.create_task(server.serve(list(sockets)))
        try:
            await _first(serving, server.up.wait())
            if serving.done():
                await serving  # raises why it could not start
        except OSError as e:
            raise _address_error(e, url) from e
        spare_the_collector()
        on_ready(url)
        await _first(serving, stop.wait())
        app.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.drain_seconds):
                await _first(app.idle(), abort.wait())
        clean = app.num_live == 0
        if not clean:
            app.abort_all()
            await asyncio.sleep(0)
            server.force_exit = abort.is_set()
        server.should_exit = True
        await serving
    return 0 if clean else 1


def _allow_connections() -> None:
    """As many open files as this user may have: each connection is one, and more may wait than the 1,024 that
    shells give by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


async def _first(*waits: Any) -> None:
    """Returns when one of them is done; cancels those that were made here for the wait."""
    tasks = [w if isinstance(w, asyncio.Task) else asyncio.ensure_future(w) for w in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, task in zip(waits, tasks, strict=True):
            if wait is not task:
                task.cancel()


@contextlib.contextmanager
def _beside(work: Coroutine[Any, Any, None]) -> Generator[None]:
    """Runs it until the context ends."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, abort: asyncio.Event) -> Generator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (abort if stop.is_set() else stop).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.add_signal_handler(number, lambda: None)  # it is ending, and that takes a bounded time


def make_server(app: Served, config: HttpConfig) -> Any:
    import uvicorn

    from pegainfer.frontend.http.connection.protocol import bounded_protocol

    class Server(uvicorn.Server):
        """uvicorn without its own signal handling, and with an event for 'accepting connections'."""

        def __init__(self, settings: uvicorn.Config) -> None:
            super().__init__(settings)
            self.up = asyncio.Event()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.up.set()

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            http=bounded_protocol(config, app.refused),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nothing here reads the client's address
            timeout_keep_alive=round(config.idle_connection_seconds),
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ssl_certfile=config.ssl_certfile or None,
            ssl_keyfile=config.ssl_keyfile or None,
        )
    )
