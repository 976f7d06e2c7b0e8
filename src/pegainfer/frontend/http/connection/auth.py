"""Bearer keys. Every route but /health and /ready is closed, by the raw path, before any routing.

An admin key opens all that other keys open, and besides what changes the server for everybody.
A browser cannot show a bearer key when it opens a page, so the page's files may be opened besides.
"""

from __future__ import annotations

import hashlib
import hmac
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_error
from pegainfer.frontend.http.connection.keys import digests
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.body import header

OPEN_PATHS = frozenset({b"/health", b"/ready"})  # for probes, which have no key
TENANT_BYTES = 8  # enough to tell keys apart
_KEY, _ADMIN = "pegainfer.key", "pegainfer.admin"  # in the scope
ADMIN_PATHS = frozenset(
    {
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/debug/trace", "/debug/slow",
        "/admin/models/load", "/admin/models/unload",
    }
)  # fmt: skip
NO_KEY = "Authorization: expected 'Bearer <key>' (or x-api-key: <key>) with a known key"
# Of the request that the running task answers; "" where no key is asked for.
_TENANT: ContextVar[str] = ContextVar("tenant", default="")


class KeyAuth:
    """ASGI middleware. Keys are kept and compared as SHA-256 digests, all of them, in constant time."""

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        admin_keys: tuple[str, ...] = (),
        open_paths: frozenset[bytes] = OPEN_PATHS,
    ) -> None:
        """
        Args:
            keys: none: what is no admin's is open to everybody.
            open_paths: raw paths that need no key.
        """
        self._app = app
        self._open_paths = open_paths
        self._known = digests(keys)
        self._admins = digests(admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await send_error(send, error, scope.get("path", ""))
            return
        token = _TENANT.set((key_digest(scope) or b"")[:TENANT_BYTES].hex())
        try:
            await self._app(scope, receive, send)
        finally:
            _TENANT.reset(token)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the request is not let in. Notes in the scope whose it is."""
        shown = _shown_key(scope)
        digest = b"" if shown is None else hashlib.sha256(shown).digest()
        admin, known = _among(digest, self._admins), _among(digest, self._known)
        if known or admin:
            scope[_KEY], scope[_ADMIN] = digest, admin
        # By the path that routing will see: another spelling of it must not open the door.
        if scope["path"].rstrip("/") in ADMIN_PATHS and not admin:
            if known or not self._known:
                return ApiError(403, f"{scope['path'][:200]}: expected an admin key")
            return ApiError(401, NO_KEY)
        if known or admin or not self._known or scope.get("raw_path") in self._open_paths:
            return None
        return ApiError(401, NO_KEY)


def _among(digest: bytes, known: tuple[bytes, ...]) -> bool:
    found = False
    for each in known:  # all of them, so that the time says nothing
        found |= hmac.compare_digest(digest, each)
    return found


def is_admin(scope: Scope) -> bool:
    """Whether the request has shown an admin key: it may end others' requests."""
    return bool(scope.get(_ADMIN))


def key_digest(scope: Scope) -> bytes | None:
    """Of the key that a request has shown; None where none is asked for."""
    digest: bytes | None = scope.get(_KEY)
    return digest


def tenant() -> str:
    """Who sent the request under way: a part of its key's digest."""
    return _TENANT.get()


def _shown_key(scope: Scope) -> bytes | None:
    """The bearer token; without one, the header by which Anthropic's clients send their key.

    Authorization of another scheme was meant for a proxy before this server.
    """
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key")
