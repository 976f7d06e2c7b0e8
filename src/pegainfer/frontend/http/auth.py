"""Bearer keys. Every route but /health is closed, by the raw path, before routing looks at the request.

A browser cannot show a bearer key when it opens a page, so the page's files may be opened besides.
"""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from pegainfer.frontend.http.body import header
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses import send_error

OPEN_PATHS = frozenset({b"/health"})


class KeyAuth:
    """ASGI middleware. Keys are kept and compared as SHA-256 digests, all of them, in constant time."""

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[bytes] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("raw_path") in self._open_paths or self._knows(scope):
            await self._app(scope, receive, send)
            return
        await send_error(send, ApiError(401, "Authorization: expected 'Bearer <key>' with a known key"))

    def _knows(self, scope: Scope) -> bool:
        value = header(scope, b"authorization") or b""
        scheme, _, token = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(token.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found
