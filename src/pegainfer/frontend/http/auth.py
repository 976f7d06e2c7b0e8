"""Bearer keys. Every route but /health is closed, by the raw path, before routing looks at the request.

A browser cannot show a bearer key when it opens a page, so the page's files may be opened besides.
"""

from __future__ import annotations

import hashlib
import hmac
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from pegainfer.frontend.http.body import header
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses import send_error

OPEN_PATHS = frozenset({b"/health"})
TENANT_BYTES = 8  # enough to tell keys apart
_KEY = "pegainfer.key"  # in the scope
# Of the request that the running task answers; "" where no key is asked for.
_TENANT: ContextVar[str] = ContextVar("tenant", default="")


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
            token = _TENANT.set((key_digest(scope) or b"")[:TENANT_BYTES].hex())
            try:
                await self._app(scope, receive, send)
            finally:
                _TENANT.reset(token)
            return
        error = ApiError(401, "Authorization: expected 'Bearer <key>' (or x-api-key: <key>) with a known key")
        await send_error(send, error, scope.get("path", ""))

    def _knows(self, scope: Scope) -> bool:
        """Notes the key's digest in the scope, for what belongs to a key."""
        token = _shown_key(scope)
        if token is None:
            return False
        digest = hashlib.sha256(token).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        if found:
            scope[_KEY] = digest
        return found


def key_digest(scope: Scope) -> bytes | None:
    """Of the key that a request has shown; None where none is asked for."""
    digest: bytes | None = scope.get(_KEY)
    return digest


def tenant() -> str:
    """Who sent the request under way: a part of its key's digest."""
    return _TENANT.get()


def _shown_key(scope: Scope) -> bytes | None:
    """The bearer token; without one, the header by which Anthropic's clients send their key."""
    value = header(scope, b"authorization")
    if value is None:
        return header(scope, b"x-api-key")
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
