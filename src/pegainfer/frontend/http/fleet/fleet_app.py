"""The ASGI application of a server with several models: each request goes to the routes of its model.

request ─► keys and guards ─► of the server itself: fleet_routes.py
                          └─► the body's `model` ─► Fleet.using ─► that model's routes, with the body anew
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer.contract.observation import Observer
from pegainfer.frontend.http.answer.responses import send_error
from pegainfer.frontend.http.app import MODEL_PATHS, guarded, no_route
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.dispatch import Dispatch
from pegainfer.frontend.http.errors import to_api_error
from pegainfer.frontend.http.fleet.fleet import Fleet
from pegainfer.frontend.http.fleet.fleet_member import Member
from pegainfer.frontend.http.fleet.fleet_routes import ROUTES, FleetHandler
from pegainfer.frontend.http.observation.metrics import FrontMetrics
from pegainfer.frontend.http.observation.observed import Observed
from pegainfer.frontend.http.request.body import ClientGoneError, read_body
from pegainfer.frontend.http.request.limits import Held

T = TypeVar("T")
_SHARED = ("/v1/responses/resp_", "/static/")  # beginnings of paths that any model serves


class _Named(msgspec.Struct):
    """What of a body says where it goes; all else is checked by the model's own routes."""

    model: Any = None


_named = msgspec.json.Decoder(_Named)


class FleetApp:
    """What `run_server` serves for several models. Also the handle by which it is drained."""

    def __init__(self, fleet: Fleet, config: HttpConfig, observers: Sequence[Observer] = ()) -> None:
        self.fleet = fleet
        self.config = config
        self.metrics = FrontMetrics()  # of the event loop alone; those of requests are the models' own
        self.registry = fleet.registry
        self._held = Held(config)
        own = [Route(path, _Endpoint(self, call), methods=[method]) for method, path, call in ROUTES]
        routes = [*own, Mount("/", app=self._by_model)]
        self._observed = Observed(guarded(Dispatch(routes, no_route), config), list(observers))
        self._app: ASGIApp = self._observed if observers else self._observed.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def refused(self, status: int, client: str, message: str) -> None:
        self._observed.refused(status, client, message)

    @property
    def num_live(self) -> int:
        return len(self.registry.live)

    def drain(self) -> None:
        self.fleet.draining = True
        for member in self.fleet.members.values():
            if member.loaded is not None:
                member.loaded.front.gate.draining = True

    async def idle(self) -> None:
        await self.registry.idle.wait()

    def abort_all(self) -> None:
        for generation in list(self.registry.live.values()):
            generation.abort()

    async def _by_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request to the routes of its model."""
        path, size = scope["path"], 0
        shared = path.startswith(_SHARED)
        if path not in MODEL_PATHS and not shared:
            raise HTTPException(404)
        try:
            if shared or scope["method"] != "POST":
                member = self.fleet.any() if shared else self.fleet.find(None)
                async with self.fleet.using(member) as loaded:
                    await loaded.routes(scope, receive, send)
                return
            body = await read_body(scope, receive, self.config)
            size = len(body)
            self._held.add(size)
            async with _Again(body, receive) as again:
                await self._answer(self.fleet.find(_model_of(body)), scope, again, send)
        except ClientGoneError:
            return
        except Exception as e:
            await send_error(send, to_api_error(e), path)
        finally:
            self._held.num_bytes -= size

    async def _answer(self, member: Member, scope: Scope, receive: _Again, send: Send) -> None:
        """Waits for the model and lets it answer. Raises ClientGoneError where the client left before."""
        context = self.fleet.using(member)
        loaded = await receive.unless_gone(asyncio.ensure_future(context.__aenter__()))
        try:
            await loaded.routes(scope, receive, send)
        finally:
            await context.__aexit__(None, None, None)


class _Again:
    """The `receive` of a request whose body was read: the body once more, then the end of the connection."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._end = asyncio.ensure_future(_message(receive))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._end.cancel()

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await asyncio.shield(self._end)

    async def unless_gone(self, work: asyncio.Future[T]) -> T:
        """What the work gives. Raises ClientGoneError, and cancels it, where the client hangs up before."""
        try:
            either: list[asyncio.Future[Any]] = [work, self._end]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientGoneError
        finally:
            work.cancel()


async def _message(receive: Receive) -> Message:
    return await receive()


def _model_of(body: bytes) -> str | None:
    """The model that a body names; None too for a body that is none, which its route refuses."""
    try:
        name = _named.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return name if isinstance(name, str) else None


class _Endpoint:
    """One route of the server itself as ASGI."""

    def __init__(self, app: FleetApp, handler: FleetHandler) -> None:
        self._app = app
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(self._app.fleet, self._app.config, scope, receive, send)
        except ClientGoneError:
            return
        except Exception as e:
            await send_error(send, to_api_error(e), scope["path"])
