"""The routes that load and unload LoRA adapters, for holders of an admin key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.contract.errors import EngineDeadError, PegaError
from pegainfer.frontend.adapter_calls import load_adapter, unload_adapter
from pegainfer.frontend.http.answer.responses import send_json
from pegainfer.frontend.http.connection.auth import is_admin
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.limits import bad_value

MAX_NAME = 256  # characters


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str  # that requests will name as their model
    lora_path: str  # of its folder, absolute or below --lora-root
    load_inplace: bool = False  # the name may be that of a loaded adapter, which this one replaces


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: Any = None  # adapters have no numbers here


async def load(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/load_lora_adapter: answers once requests may name the adapter. Raises ApiError."""
    request, _ = await read_request(scope, receive, LoadAdapterRequest, front.config)
    _check_engine(front, scope)
    _check_caller(scope)
    name = request.lora_name
    if not 0 < len(name) <= MAX_NAME:
        raise bad_value("lora_name", f"1 to {MAX_NAME} characters", len(name))
    if name in front.names:
        raise bad_value("lora_name", "another name than the model's", repr(name))
    path = _bounded(front, request.lora_path)
    try:
        await load_adapter(front.engine, name, str(path), inplace=request.load_inplace)
    except EngineDeadError:
        raise
    except PegaError as error:
        param = getattr(error, "param", None) or "lora_path"
        raise ApiError(400, str(error), param=param) from error
    await send_json(send, {"lora_name": name, "loaded": True})


async def unload(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/unload_lora_adapter: requests that were taken go on. Raises ApiError."""
    request, _ = await read_request(scope, receive, UnloadAdapterRequest, front.config)
    _check_engine(front, scope)
    _check_caller(scope)
    if front.adapter(request.lora_name) is None:
        raise ApiError(404, f"lora_name: no adapter {request.lora_name!r:.80} is loaded", param="lora_name")
    await unload_adapter(front.engine, request.lora_name)
    await send_json(send, {"lora_name": request.lora_name, "unloaded": True})


def _check_engine(front: Front, scope: Scope) -> None:
    if not front.engine.info.max_adapters:
        raise ApiError(
            404, f"{scope['path'][:200]}: this server serves no adapters; start it with --enable-lora",
            code="unsupported",
        )  # fmt: skip


def _check_caller(scope: Scope) -> None:
    """A server with keys has refused others before their body was read (auth.py)."""
    if not is_admin(scope):
        raise ApiError(
            403, f"{scope['path'][:200]}: expected an admin key; the server's --admin-key sets one"
        )


def _bounded(front: Front, given: str) -> Path:
    """The folder, links resolved, which must lie below --lora-root."""
    if not front.config.lora_root:
        raise ApiError(403, "lora_path: this server loads no adapters by request; start it with --lora-root")
    root = Path(front.config.lora_root).resolve()
    try:
        path = (root / given).resolve()
    except (OSError, ValueError):  # a loop of links, a zero byte
        raise bad_value("lora_path", "a folder", f"{given!r:.80}") from None
    if path == root or not path.is_relative_to(root):
        raise bad_value("lora_path", "a folder below the server's --lora-root", f"{given!r:.80}")
    return path
