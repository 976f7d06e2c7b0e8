"""The routes about the server itself: health, readiness, load, metrics, models, version, abort."""

from __future__ import annotations

import datetime
import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer import __version__
from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.answer.responses import send_bytes, send_json
from pegainfer.frontend.http.connection.auth import is_admin, tenant
from pegainfer.frontend.http.errors import RETRY_DEAD_ENGINE, ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.limits import RETRY_SECONDS

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Model(msgspec.Struct, kw_only=True):
    """What OpenAI's clients read of a model, and what Anthropic's do."""

    id: str
    object: str = "model"
    created: int  # seconds of the wall clock, when the server started
    owned_by: str = "pegainfer"
    root: str  # the model's own name; of an adapter its folder
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: the model that it adapts
    max_model_len: int
    type: str = "model"
    display_name: str
    created_at: str  # RFC 3339
    max_input_tokens: int
    lifecycle: str = "active"
    default_sampling_params: dict[str, float | int | None]  # of chats, where a request says nothing


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool = False


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    request_id: str


async def health(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """200 while the engine's process lives, however long its step takes. Raises ApiError (503) after that."""
    _check_alive(front)
    await send_json(send, {"status": "ok"})


async def ready(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """200 if a request sent now would be taken and served by an engine that moves. Raises ApiError (503)."""
    _check_alive(front)
    if front.gate.draining:
        raise ApiError(503, "the server is shutting down", code="draining", retry_after=5.0)
    if front.gate.full:
        raise ApiError(503, "the queue is full", code="overloaded", retry_after=RETRY_SECONDS)
    stats = front.engine.stats()
    if front.registry.live:
        # An engine that idled before has an old last step: its clock starts with the work.
        still = time.monotonic() - max(stats.last_step, front.registry.busy_since)
        if still > front.config.ready_seconds:
            raise ApiError(503, f"the engine made no step for {still:.0f} s", code="stalled", retry_after=5.0)
    await send_json(send, {"status": "ready"})


def _check_alive(front: Front) -> None:
    death = front.engine.death()
    if death is not None:
        raise ApiError(503, str(death), code="engine_dead", retry_after=RETRY_DEAD_ENGINE)


async def load(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """How much there is to do, and room for more: for balancers."""
    stats = front.engine.stats()
    body = {
        "server_load": len(front.registry.live),  # requests that are being answered
        "running": stats.running,
        "waiting": stats.waiting,
        "queued_requests": front.gate.waiting_requests,
        "queued_tokens": front.gate.waiting_tokens,
        "free_blocks": stats.free_blocks,
        "total_blocks": stats.total_blocks,
    }
    await send_json(send, body)


async def version(front: Front | None, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"version": __version__})


async def metrics(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_bytes(send, front.page.render(), content_type=METRICS_TYPE)


async def models(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    names = [*front.names, *(a.name for a in front.engine.adapters())]
    listed = [_model(front, name) for name in names]
    await send_json(send, ModelList(data=listed, first_id=listed[0].id, last_id=listed[-1].id))


async def model(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    name: str = scope["path_params"]["name"]
    front.check_model(name)
    await send_json(send, _model(front, name))


def _model(front: Front, name: str) -> Model:
    info, adapter = front.engine.info, front.adapter(name)
    at = datetime.datetime.fromtimestamp(front.created, datetime.UTC)
    return Model(
        id=name,
        created=front.created,
        root=info.model if adapter is None else adapter.path,
        parent=msgspec.UNSET if adapter is None else front.names[0],
        max_model_len=info.max_model_len,
        display_name=name,
        created_at=at.isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_model_len - 1,
        default_sampling_params=msgspec.structs.asdict(front.chat_defaults),
    )


async def abort(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Ends a running request; its client gets what there is, with finish_reason 'abort'.

    Raises ApiError (404) where the caller has none of this id.
    """
    request, _ = await read_request(scope, receive, AbortRequest, front.config)
    await send_json(send, aborted(front.registry, request.request_id, scope))


def aborted(registry: Registry, request_id: str, scope: Scope) -> dict[str, Any]:
    """Ends a request and says so. Raises ApiError (404) where the caller has none of this id."""
    generation = registry.find(_plain_id(request_id), tenant(), others=is_admin(scope))
    if generation is None:
        raise ApiError(404, "request_id: no such request of yours is running", param="request_id")
    generation.abort()
    return {"request_id": generation.id, "aborted": True}


def _plain_id(id: str) -> str:
    """An answer's id without its route's prefix."""
    for prefix in ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-", "rerank-"):
        if id.startswith(prefix):
            return id.removeprefix(prefix)
    return id
