"""The routes of a server with several models that belong to no single one of them."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_bytes, send_json
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.auth import is_admin
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.fleet.fleet import Fleet
from pegainfer.frontend.http.fleet.fleet_member import Member, State
from pegainfer.frontend.http.observation.metrics import registry_of, rendered
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.routes.service import METRICS_TYPE, version

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

FleetHandler = Callable[[Fleet, HttpConfig, Scope, Receive, Send], Awaitable[None]]


# Figures of the process, which every model's page has: shown once, under the first loaded model's name.
_OF_THE_SERVER = ("uptime_seconds", "resident_memory_bytes")


class FleetModel(msgspec.Struct, kw_only=True):
    """One model, loaded or not. What only a loaded one knows is left out otherwise."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "pegainfer"
    state: str  # unloaded, loading, loaded or unloading
    loaded: bool
    memory_bytes: int | msgspec.UnsetType = msgspec.UNSET  # planned for it, from its first load on
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    # Of chats, where a request says nothing.
    default_sampling_params: dict[str, float | int | None] | msgspec.UnsetType = msgspec.UNSET
    type: str = "model"
    display_name: str
    created_at: str  # RFC 3339


class ModelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str


async def _health(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """200 while the server lives; an engine that dies is replaced when its model is next asked for."""
    await send_json(send, {"status": "ok"})


async def _ready(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """200 if a request sent now would be taken. Raises ApiError (503)."""
    if fleet.draining:
        raise ApiError(503, "the server is shutting down", code="draining", retry_after=5.0)
    await send_json(send, {"status": "ready"})


async def _load_figures(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """How much there is to do, in all models together."""
    sums = dict.fromkeys(
        ("running", "waiting", "queued_requests", "queued_tokens", "free_blocks", "total_blocks"), 0
    )
    fronts = [m.loaded.front for m in fleet.members.values() if m.loaded is not None]
    for front in fronts:
        stats = front.engine.stats()
        sums["running"] += stats.running
        sums["waiting"] += stats.waiting
        sums["queued_requests"] += front.gate.waiting_requests
        sums["queued_tokens"] += front.gate.waiting_tokens
        sums["free_blocks"] += stats.free_blocks
        sums["total_blocks"] += stats.total_blocks
    users = sum(m.users + len(m.waiting) for m in fleet.members.values())
    await send_json(send, {"server_load": users, **sums, "loaded_models": len(fronts)})


async def _version(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    await version(None, scope, receive, send)


async def _metrics(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    page = rendered(registry_of(FleetMetrics(fleet, config.metrics_prefix)))
    await send_bytes(send, page, content_type=METRICS_TYPE)


class FleetMetrics:
    """A prometheus collector over all loaded models, each under its `model_name`, and their loading."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        self._fleet = fleet
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for member in self._fleet.members.values():
            if member.loaded is not None:
                for family in member.loaded.front.page.collect():
                    known = families.setdefault(family.name, family)
                    if known is not family and not family.name.endswith(_OF_THE_SERVER):
                        known.samples += family.samples
        yield from families.values()
        yield from self._loading()

    def _loading(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        kinds: tuple[tuple[Any, str, str, Callable[[Member], float]], ...] = (
            (GaugeMetricFamily, "model_loaded", "1 while the model is loaded.",
             lambda m: float(m.state is State.LOADED)),
            (GaugeMetricFamily, "model_memory_bytes", "Memory planned for a loaded model.",
             lambda m: float(m.nbytes if m.loaded is not None else 0)),
            (CounterMetricFamily, "model_loads", "Times that the model was loaded.", lambda m: m.loads),
            (CounterMetricFamily, "model_load_seconds", "Time that its loads took.",
             lambda m: m.load_seconds),
        )  # fmt: skip
        for kind, name, text, value in kinds:
            family = kind(self._prefix + name, text, labels=["model_name"])
            for member in self._fleet.members.values():
                family.add_metric([member.name], value(member))
            yield family


async def _models(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    data = [_model(member) for member in fleet.members.values()]
    await send_json(
        send,
        {
            "object": "list",
            "data": data,
            "first_id": data[0].id,
            "last_id": data[-1].id,
            "has_more": False,
        },
    )


async def _one_model(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, _model(fleet.find(scope["path_params"]["name"])))


def _model(member: Member) -> FleetModel:
    front = None if member.loaded is None else member.loaded.front
    at = datetime.datetime.fromtimestamp(member.created, datetime.UTC)
    return FleetModel(
        id=member.name,
        created=member.created,
        state=member.state.value,
        loaded=member.state is State.LOADED,
        memory_bytes=member.nbytes or msgspec.UNSET,
        max_model_len=msgspec.UNSET if front is None else front.engine.info.max_model_len,
        default_sampling_params=msgspec.UNSET if front is None else structs.asdict(front.chat_defaults),
        display_name=member.name,
        created_at=at.isoformat().replace("+00:00", "Z"),
    )


async def _abort(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """Ends a running request of any model. Raises ApiError (404) where the caller has none of this id."""
    from pegainfer.frontend.http.routes.service import AbortRequest, aborted

    request, _ = await read_request(scope, receive, AbortRequest, config)
    await send_json(send, aborted(fleet.registry, request.request_id, scope))


async def _admin_load(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """Loads a model now. Raises ApiError (403 without an admin key, 404, 503)."""
    _check_admin(scope)
    request, _ = await read_request(scope, receive, ModelRequest, config)
    member = fleet.find(request.model)
    started = time.monotonic()
    await fleet.load(member)
    seconds = round(time.monotonic() - started, 3)
    await send_json(send, {"model": member.name, "loaded": True, "seconds": seconds})


async def _admin_unload(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """Unloads a model once its requests have finished. Raises ApiError (403 without an admin key, 404)."""
    _check_admin(scope)
    request, _ = await read_request(scope, receive, ModelRequest, config)
    member = fleet.find(request.model)
    await fleet.unload(member)
    await send_json(send, {"model": member.name, "loaded": False})


def _check_admin(scope: Scope) -> None:
    if not is_admin(scope):
        raise ApiError(
            403, f"{scope['path'][:200]}: expected an admin key; the server's --admin-key sets one"
        )


async def _not_here(fleet: Fleet, config: HttpConfig, scope: Scope, receive: Receive, send: Send) -> None:
    """Adapters and traces belong to servers with one model."""
    raise ApiError(
        404, f"{scope['path'][:200]}: not with several models; start a server for one of them",
        code="unsupported",
    )  # fmt: skip


ROUTES: tuple[tuple[str, str, FleetHandler], ...] = (
    ("GET", "/health", _health),
    ("GET", "/ready", _ready),
    ("GET", "/load", _load_figures),
    ("GET", "/version", _version),
    ("GET", "/metrics", _metrics),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{name:path}", _one_model),
    ("POST", "/v1/abort", _abort),
    ("POST", "/admin/models/load", _admin_load),
    ("POST", "/admin/models/unload", _admin_unload),
    ("POST", "/v1/load_lora_adapter", _not_here),
    ("POST", "/v1/unload_lora_adapter", _not_here),
    ("POST", "/debug/trace", _not_here),
    ("GET", "/debug/slow", _not_here),
)
