"""An EngineHandle over a Unix socket: the front's side of the two processes.

Everything runs on the event loop that made the connection, sinks included. The life of a request:

    submit ──────► live (its sink gets events) ──────► last index finished: forgotten
                     │ Refused             → one ERROR event an open index, error_kind names the exception
                     │ connection lost     → the same with EngineDeadError
                     └ cancel              → stays live until the engine's ABORT
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from pegainfer.contract import codec
from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import (
    ConfigError,
    EngineDeadError,
    PegaError,
    QueueFullError,
    restored_error,
)
from pegainfer.contract.event import EngineStats
from pegainfer.contract.frames import FrameReader
from pegainfer.contract.handle import DoneSink, EngineInfo, EventSink, PendingCalls
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.trace import StepSink
from pegainfer.frontend.live_requests import LiveRequests

log = logging.getLogger(__name__)
Explain = Callable[[], Awaitable[EngineDeadError]]
CONNECT_RETRY = 0.01  # seconds between attempts while the engine has not bound its socket yet


class EngineClient(asyncio.Protocol):
    """Implements contract.handle.EngineHandle. Call its methods from its event loop only."""

    def __init__(self, explain: Explain | None = None) -> None:
        """`explain`: called when the connection is lost; says at once, or after a moment, why."""
        self._explain = explain
        self._explaining: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader(codec.MAX_FRAME)
        self._live = LiveRequests()
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._adapters: tuple[AdapterInfo, ...] = ()
        self._calls = PendingCalls()
        self._step_sink: StepSink | None = None
        self._draining = False
        self._closing = False
        self._death: EngineDeadError | ConfigError | None = None
        self._ready: asyncio.Event = asyncio.Event()  # Ready came, or the engine is gone
        self._closed: asyncio.Event = asyncio.Event()

    # ------------------------------------------------------------------ connecting

    @classmethod
    async def connect(
        cls, path: str, *, timeout: float = 60.0, explain: Explain | None = None
    ) -> EngineClient:
        """Connects to the socket at `path`, waiting for it to appear, and waits until the engine is ready.

        Raises:
            EngineDeadError: nobody listened within `timeout` seconds, or the engine ended early.
            ConfigError: the engine says that it cannot start, and why.
        """
        loop = asyncio.get_running_loop()
        client = cls(explain)
        end = loop.time() + timeout
        while True:
            try:
                await loop.create_unix_connection(lambda: client, path)
                break
            except (FileNotFoundError, ConnectionRefusedError) as e:
                if loop.time() >= end:
                    raise EngineDeadError(
                        "no engine listens on its socket", expected=f"one within {timeout:g} s", where=path
                    ) from e
                await asyncio.sleep(CONNECT_RETRY)
        await client.wait_ready()
        return client

    @classmethod
    async def attach(cls, sock: socket.socket, explain: Explain | None = None) -> EngineClient:
        """The same over a connected socket, e.g. one half of a socketpair."""
        client = cls(explain)
        await asyncio.get_running_loop().create_unix_connection(lambda: client, sock=sock)
        await client.wait_ready()
        return client

    async def wait_ready(self) -> EngineInfo:
        """Waits for the engine's Ready. Raises as `connect`."""
        await self._ready.wait()
        if self._info is None or self._death is not None:
            raise self._death or EngineDeadError("the engine ended before it was ready")
        return self._info

    async def wait_closed(self) -> None:
        """Returns when the connection has ended."""
        await self._closed.wait()

    # ------------------------------------------------------------------ EngineHandle

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself. Raises EngineDeadError before it was ready."""
        if self._info is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._info

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        """Sends a request. A refusal of the engine comes as an ERROR event for each of its n indices.

        Raises:
            EngineDeadError: the engine has ended.
            QueueFullError: it is draining.
            RequestError: a live request has the same id.
            PegaError: the request is longer than a frame may be.
        """
        if not self.alive():
            raise self._dead()
        if self._draining:
            raise QueueFullError("the server is shutting down", retry_after=5.0)
        self._live.check(request.id)
        frame = codec.encode_frame(codec.Submit(request))
        self._live.add(request.id, sink, request.n)
        self._write(frame)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        if self._live.is_open(request_id, index) and self.alive():
            self._write(codec.encode_frame(codec.Cancel(request_id, index)))

    def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
        self._call(codec.LoadAdapter(self._calls.add(done), name, path, inplace))

    def unload_adapter(self, name: str, done: DoneSink) -> None:
        self._call(codec.UnloadAdapter(self._calls.add(done), name))

    def reset_prefix_cache(self, done: DoneSink) -> None:
        self._call(codec.ResetPrefixCache(self._calls.add(done)))

    def _call(self, message: codec.Call) -> None:
        if self.alive():
            self._write(codec.encode_frame(message))
        else:
            self._calls.end(message.call, self._dead())

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._adapters

    def stats(self) -> EngineStats:
        return self._stats

    def trace(self, sink: StepSink | None) -> None:
        """Steps that are still on their way when None is given go to the sink before."""
        if sink is not None:
            self._step_sink = sink
        if self.alive():
            self._write(codec.encode_frame(codec.Trace(sink is not None)))

    def alive(self) -> bool:
        gone = self._explaining is not None or self._closed.is_set()
        return self._info is not None and self._death is None and not gone

    def death(self) -> EngineDeadError | None:
        return None if self.alive() else self._dead()

    def drain(self) -> None:
        if not self._draining and self.alive():
            self._write(codec.encode_frame(codec.Drain()))
        self._draining = True

    def close(self) -> None:
        """Asks the engine to end and hangs up once that is written; `wait_closed` follows it."""
        if self._closing:
            return
        self._closing = True
        if self._transport is not None and not self._transport.is_closing():
            self._write(codec.encode_frame(codec.Shutdown()))
            self._transport.close()

    @property
    def num_live(self) -> int:
        """Requests whose last event has not come."""
        return len(self._live)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._dispatch(codec.decode_to_front(body))
        except (PegaError, msgspec.DecodeError) as e:
            log.error("the engine sent a broken frame: %s", e)
            self._die(EngineDeadError("the engine sent a broken frame", remedy="restart the server"))

    def eof_received(self) -> bool:
        return False  # closes the transport, so that connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        if self._explain is None or self._closing or self._death is not None:
            self._end(self._dead())
        else:
            self._explaining = asyncio.ensure_future(self._end_explained(self._explain()))

    async def _end_explained(self, explanation: Awaitable[EngineDeadError]) -> None:
        death = self._dead()
        try:
            death = await explanation
        except Exception:  # the requests in flight must end all the same
            log.exception("nobody knows how the engine ended")
        self._end(death)

    def _end(self, death: EngineDeadError) -> None:
        self._die(death)
        self._closed.set()

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frame)

    def _dead(self) -> EngineDeadError:
        if isinstance(self._death, EngineDeadError):
            return self._death
        if self._closing:
            return EngineDeadError("the server is shutting down")
        return EngineDeadError("the engine process has ended", remedy="restart the server; its log says why")

    def _dispatch(self, message: codec.ToFront) -> None:
        match message:
            case codec.Events(events=events, stats=stats):
                if stats is not None:
                    self._stats = stats
                for event in events:
                    self._live.deliver(event)
            case codec.Refused(request_id=request_id):
                self._live.fail(request_id, _error_of(message))
            case codec.Adapters(adapters=adapters):
                self._adapters = tuple(adapters)
            case codec.Done(call=call, kind=kind):
                self._calls.end(call, None if kind is None else _error_of(message))
            case codec.Steps(steps=steps):
                if self._step_sink is not None:
                    self._step_sink(steps)
            case codec.Ready(info=info):
                self._info = info
                self._ready.set()
            case codec.Failed(message=text, user_error=user_error):
                if self._info is None and user_error:
                    self._death = ConfigError(text)
                    self._die(self._death)
                else:
                    self._die(EngineDeadError("the engine has failed: " + text))

    def _die(self, death: EngineDeadError | ConfigError) -> None:
        """Ends every live request; later submits are refused. Idempotent."""
        if self._death is None:
            self._death = death
        self._ready.set()
        self._live.fail_all(EngineDeadError(str(death)))
        self._calls.end_all(EngineDeadError(str(death)))
        if self._transport is not None:
            self._transport.close()


def _error_of(message: codec.Refused | codec.Done) -> PegaError:
    return restored_error(message.kind, message.message, message.param, message.retry_after)
