"""The ASGI application: routes, and what wraps every one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer.contract.handle import EngineHandle
from pegainfer.contract.observation import Observer, TraceBuffer
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http import page
from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.answer.responses import encode, error_headers, send_error
from pegainfer.frontend.http.anthropic import routes as anthropic_routes
from pegainfer.frontend.http.api_docs import routes as api_docs
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.auth import OPEN_PATHS, KeyAuth
from pegainfer.frontend.http.connection.browsers import BrowserGuard
from pegainfer.frontend.http.connection.dispatch import Dispatch
from pegainfer.frontend.http.errors import ApiError, to_api_error
from pegainfer.frontend.http.front import Front, new_store
from pegainfer.frontend.http.observation.metrics import REFUSALS, FrontMetrics
from pegainfer.frontend.http.observation.observed import Observed, note_error
from pegainfer.frontend.http.observation.tracing import Tracing
from pegainfer.frontend.http.request.body import ClientGoneError
from pegainfer.frontend.http.request.generation_config import generation_defaults, overrides
from pegainfer.frontend.http.responses_api import routes as responses_routes
from pegainfer.frontend.http.responses_api.store import ResponseStore
from pegainfer.frontend.http.routes import (
    adapters,
    chat,
    completions,
    embeddings,
    scores,
    service,
    text_routes,
    trace_routes,
)
from pegainfer.frontend.own_pooling import OwnPooling
from pegainfer.frontend.tokenizer import Tokenizer

Handler = Callable[[Front, Scope, Receive, Send], Awaitable[None]]

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat.chat_completions),
    ("POST", "/v1/embeddings", embeddings.embeddings),
    ("POST", "/v1/score", scores.score),
    ("POST", "/score", scores.score),
    ("POST", "/v1/rerank", scores.rerank),
    ("POST", "/v2/rerank", scores.rerank),
    ("POST", "/rerank", scores.rerank),
    ("POST", "/v1/responses", responses_routes.create),
    ("POST", "/v1/responses/input_tokens", responses_routes.input_tokens),
    ("GET", "/v1/responses/{id}", responses_routes.retrieve),
    ("DELETE", "/v1/responses/{id}", responses_routes.delete),
    ("POST", "/v1/responses/{id}/cancel", responses_routes.cancel),
    ("GET", "/v1/responses/{id}/input_items", responses_routes.input_items),
    ("POST", "/v1/messages", anthropic_routes.messages),
    ("POST", "/v1/messages/count_tokens", anthropic_routes.count_tokens),
    ("GET", "/health", service.health),
    ("GET", "/ready", service.ready),
    ("GET", "/metrics", service.metrics),
    ("GET", "/load", service.load),
    ("GET", "/version", service.version),
    ("GET", "/v1/models", service.models),
    ("GET", "/v1/models/{name:path}", service.model),
    ("POST", "/v1/abort", service.abort),
    ("POST", "/v1/load_lora_adapter", adapters.load),
    ("POST", "/v1/unload_lora_adapter", adapters.unload),
    ("POST", "/debug/trace", trace_routes.trace),
    ("GET", "/debug/slow", trace_routes.slow),
    ("POST", "/tokenize", text_routes.tokenize),
    ("GET", "/tokenizer_info", text_routes.tokenizer_info),
    ("POST", "/detokenize", text_routes.detokenize),
    ("POST", "/apply_template", text_routes.apply_template),
    ("GET", "/openapi.json", api_docs.document),
    ("GET", "/docs", api_docs.page),
    ("GET", "/", page.page),
    ("GET", "/dashboard", page.page),
    ("GET", "/static/{name:path}", page.page),
)


MODEL_PATHS = frozenset(path for _, path, _ in _ROUTES if "{" not in path)


class App:
    """What `run_server` serves for one model. Also the handle by which it is drained."""

    def __init__(
        self, front: Front, observers: Sequence[Observer] = (), buffer: TraceBuffer | None = None
    ) -> None:
        self.front = front
        observing = list(observers)
        if buffer is not None:
            front.tracing = Tracing(front.engine, observing, buffer, front.metrics)
        self.routes = _routes(front)
        self._observed = Observed(guarded(self.routes, front.config), observing)
        # While a trace is taken, the list of observers grows.
        self._app: ASGIApp = self._observed if observing or buffer is not None else self._observed.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def refused(self, status: int, client: str, message: str) -> None:
        """Called for bytes that the protocol has refused before they became a request."""
        self._observed.refused(status, client, message)

    @property
    def registry(self) -> Registry:
        return self.front.registry

    @property
    def metrics(self) -> FrontMetrics:
        return self.front.metrics

    @property
    def num_live(self) -> int:
        """Generations that are being answered."""
        return len(self.front.registry.live)

    def drain(self) -> None:
        """New generations get 503 from now on; running ones go on."""
        self.front.gate.draining = True
        self.front.engine.drain()

    async def idle(self) -> None:
        """Returns once nothing is being generated."""
        await self.front.registry.idle.wait()

    def abort_all(self) -> None:
        """Ends every generation; each client gets what there is, with finish_reason 'abort'."""
        for generation in list(self.front.registry.live.values()):
            generation.abort()


class Shared(msgspec.Struct, frozen=True):
    """What the apps of several models have in common, or keep over their unloading."""

    registry: Registry  # of the generations of all models
    metrics: FrontMetrics  # of this model
    responses: ResponseStore  # of all models


def create_app(
    engine: EngineHandle,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: HttpConfig,
    *,
    names: Sequence[str] = (),
    generation: Mapping[str, Any] = MappingProxyType({}),
    pooling: OwnPooling | None = None,
    observers: Sequence[Observer] = (),
    buffer: TraceBuffer | None = None,
    shared: Shared | None = None,
) -> App:
    """Assembles the application over an engine that is ready.

    Args:
        template: None where the model has none; chat then answers 400.
        names: the model's names for requests; `config.served_model_name` goes first, the engine's own is
            what remains where neither says anything.
        generation: what the model says of sampling; obeyed with `--generation-config auto`.
        pooling: what it says of embeddings and scores; None: nothing.
        observers: each is told of every request once it is answered.
        buffer: keeps traces; None: the server takes none.
        shared: what it has in common with other models of the server; None: it is alone.
    """
    served = config.served_model_name or tuple(names) or (engine.info.model,)
    common = shared or Shared(Registry(), FrontMetrics(), new_store(config))
    return App(
        Front(
            engine=engine,
            tokenizer=tokenizer,
            template=template,
            config=config,
            names=tuple(dict.fromkeys(served)),
            own_pooling=pooling or OwnPooling(),
            registry=common.registry,
            metrics=common.metrics,
            responses=common.responses,
            chat_defaults=generation_defaults(
                {
                    **(generation if config.generation_config == "auto" else {}),
                    **overrides(config.override_generation_config),
                }
            ),
        ),
        observers,
        buffer,
    )


def _routes(front: Front) -> ASGIApp:
    """All routes of one model, open to everybody."""
    routes = [Route(path, _Endpoint(front, call), methods=[method]) for method, path, call in _ROUTES]
    return Dispatch(routes, no_route)


def guarded(app: ASGIApp, config: HttpConfig) -> ASGIApp:
    """The routes behind keys and what keeps other sites' pages out."""
    if config.api_key or config.admin_key:
        opened = page.page_paths() if config.open_page else frozenset()
        app = KeyAuth(app, config.api_key, config.admin_key, OPEN_PATHS | opened)
    return BrowserGuard(app, config)


class _Endpoint:
    """One route as ASGI: whatever a handler raises before its answer began becomes an error body."""

    def __init__(self, front: Front, handler: Handler) -> None:
        self._front = front
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held, own = self._front.held, 0

        async def counting() -> Message:
            nonlocal own
            message = await receive()
            size = len(message.get("body", b""))
            own += size
            held.add(size)
            return message

        try:
            await self._handler(self._front, scope, counting, send)
        except ClientGoneError:
            return
        except Exception as e:
            error = to_api_error(e)
            if error.code in REFUSALS:
                self._front.metrics.reject(error.code)
            await send_error(send, error, scope["path"])
        finally:
            held.num_bytes -= own


async def no_route(request: Request, exc: Exception) -> Response:
    """The answer to another path or method than the routes have."""
    assert isinstance(exc, HTTPException)
    path = request.url.path[:200]
    if exc.status_code == 405:
        allow = (exc.headers or {}).get("Allow", "")
        error = ApiError(405, f"{path}: expected {allow}, got {request.method}", allow=allow)
    else:
        error = ApiError(404, f"{path}: no such route{_meant(path)}", code="no_route")
    note_error(error.message, error.status)
    return Response(encode(error.body_at(path)), error.status, dict(error_headers(error)), "application/json")


def _meant(path: str) -> str:
    """A hint for a base URL that lacks /v1, or has it twice."""
    known = {route for _, route, _ in _ROUTES}
    for candidate, base in (("/v1" + path, "…/v1"), (path.removeprefix("/v1"), "…/v1, or without it")):
        if candidate != path and candidate in known:
            return f"; this server has {candidate}: the client's base URL ends with {base}"
    return ""
