"""The routes of traces, for those with an admin key."""

from __future__ import annotations

import asyncio
import math
import time
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_bytes, send_json
from pegainfer.frontend.http.connection.auth import is_admin
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.observation.tracing import Tracing
from pegainfer.frontend.http.request.limits import bad_value

MOST_SECONDS = 60.0  # of one trace on demand
DEFAULT_SECONDS = 5.0


def _tracing_of(front: Front, scope: Scope, *, open_server: bool = False) -> Tracing:
    """Raises ApiError where the caller may not trace, or this server keeps no traces.

    Args:
        open_server: anybody may where the server has no keys at all.
    """
    has_keys = front.config.api_key or front.config.admin_key
    if not is_admin(scope) and (has_keys or not open_server):
        raise ApiError(
            403, f"{scope['path']}: expected an admin key; start the server with --admin-key to have one"
        )
    if front.tracing is None:
        raise ApiError(404, f"{scope['path']}: this server keeps no traces", code="unsupported")
    return front.tracing


async def trace(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Records for `seconds` of the query and answers with the trace. Raises ApiError (400, 403, 404)."""
    tracing = _tracing_of(front, scope)
    given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("seconds", [str(DEFAULT_SECONDS)])
    try:
        seconds = float(given[-1])
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MOST_SECONDS:
        raise bad_value("seconds", f"above 0 and at most {MOST_SECONDS:g}", repr(given[-1][:40]))
    since = time.monotonic()
    tracing.start()
    try:
        await asyncio.sleep(seconds)
    finally:
        await tracing.stop()
    body = await asyncio.to_thread(tracing.buffer.encoded, since)
    await send_bytes(send, body)


async def slow(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """The last slow requests of the trace, newest first. Raises ApiError (403, 404).

    A server without keys shows them to anybody, as it does its metrics.
    """
    found = await asyncio.to_thread(_tracing_of(front, scope, open_server=True).buffer.slow_requests)
    await send_json(send, {"requests": found})
