"""What a page in somebody's browser may do here: nothing, unless it is this server's own or was allowed.

A browser sends what any page tells it to, to servers of the user's own machine too. Where a key is asked
for, a page that has none gets nowhere. Without keys, two headers that no page can forge decide: `Origin` says
whose page it is, and `Host` what name led here (a stranger's name may be made to lead to 127.0.0.1).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import Headers, send_error
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.body import header

PREFLIGHT_SECONDS = 600  # a browser need not ask again for so long
_READS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and no page of others can read the answer
_PORTS = {"http": 80, "https": 443}
_OPEN = "/health"


class BrowserGuard:
    """ASGI middleware: refuses what foreign pages send, and tells browsers which pages are allowed."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self._app = app
        self._origins = frozenset(origin.lower() for origin in config.allowed_origin)
        self._hosts = frozenset(host.lower() for host in (config.host, *config.allowed_host))
        self._open = not config.api_key  # to whoever reaches the port
        self._checks_host = bool(config.allowed_host) or (self._open and is_loopback(config.host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"origin") or b""
        origin = given.decode("latin-1").lower()
        allowed = bool(origin) and ("*" in self._origins or origin in self._origins)
        shown = _shown_to(given) if allowed else ()
        if allowed and scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            await send(
                {"type": "http.response.start", "status": 204, "headers": [*shown, *_preflight(scope)]}
            )
            await send({"type": "http.response.body", "body": b""})
            return

        async def showing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *shown]}
            await send(message)

        error = self._foreign_host(scope) or (None if allowed else self._foreign_page(scope, origin))
        if error is None:
            await self._app(scope, receive, showing if allowed else send)
        else:
            await send_error(showing, error, scope["path"])

    def _foreign_host(self, scope: Scope) -> ApiError | None:
        given = header(scope, b"host")
        if not self._checks_host or given is None or scope["path"] == _OPEN or "*" in self._hosts:
            return None
        name = _split("//" + given.decode("latin-1"))[0]
        if name in self._hosts or is_local(name) or _is_address(name):
            return None
        return ApiError(
            403,
            f"Host: expected localhost, an address, or one given by --allowed-host, got {name[:100]!r}",
            code="foreign_host",
        )

    def _foreign_page(self, scope: Scope, origin: str) -> ApiError | None:
        if not self._open or scope["method"] in _READS:
            return None
        site = header(scope, b"sec-fetch-site")
        if site in (b"same-origin", b"none") or (not origin and site is None):
            return None
        # Pages of the web have these two schemes, or say null; what is installed (an editor, an app of the
        # desktop, a browser's extension) has others.
        web = origin in ("", "null") or origin.startswith(("http:", "https:"))
        name, port = _split(origin)
        host, host_port = _split("//" + (header(scope, b"host") or b"").decode("latin-1"))
        default = _PORTS.get(origin.partition(":")[0])
        if not web or is_local(name) or (name == host and (port or default) == (host_port or default)):
            return None
        return ApiError(
            403,
            f"Origin: expected this server's page, or one given by --allowed-origin, got {origin[:100]!r}",
            code="foreign_origin",
        )


def _shown_to(origin: bytes) -> Headers:
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"origin"),
    ]


def _preflight(scope: Scope) -> Headers:
    """The answer to a browser that asks whether a page may send a request."""
    wanted = header(scope, b"access-control-request-headers")
    return [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        *([] if wanted is None else [(b"access-control-allow-headers", wanted)]),
    ]


def _split(url: str) -> tuple[str, int | None]:
    """Host name and port of a URL; an empty name for what is none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return "", None


def _is_address(name: str) -> bool:
    """Whether it is an IP address: no stranger can make one lead elsewhere, as he can a name of his own."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_local(name: str) -> bool:
    """A name that leads to this machine wherever it is asked for (.internal: containers on it)."""
    return name == "localhost" or name.endswith((".localhost", ".internal")) or is_loopback(name)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback
