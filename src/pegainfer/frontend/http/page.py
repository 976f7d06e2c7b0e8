"""The chat page and the dashboard: files of this package, served from memory. They hold nothing secret.

What a model writes is shown in this page, so its headers let a browser run and fetch nothing but these files,
and (where the browser knows Trusted Types) only DOMPurify may turn text into markup. See docs/page.md.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_bytes
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import header

STATIC = Path(__file__).with_name("static")
PREFIX = "/static/"
DOCUMENTS = {"/": "index.html", "/dashboard": "dashboard.html"}

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",  # the sanitiser of what a model writes
    )
)

_HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # kept by the browser, and asked for anew with its ETag each time
    (b"vary", b"accept-encoding"),
)


class _File(NamedTuple):
    content_type: bytes
    body: bytes
    gzipped: bytes
    etag: bytes  # weak: both encodings have the same


@functools.cache
def _files() -> dict[str, _File]:
    """Path of the URL → file. Nothing but these is ever read, so a path cannot lead elsewhere."""
    found = {PREFIX + p.relative_to(STATIC).as_posix(): p for p in STATIC.rglob("*") if p.suffix in _TYPES}
    found |= {path: found.pop(PREFIX + name) for path, name in DOCUMENTS.items()}
    return {path: _load(file) for path, file in found.items()}


def _load(file: Path) -> _File:
    body = file.read_bytes()
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
    return _File(_TYPES[file.suffix], body, gzip.compress(body, mtime=0), etag.encode())


def page_paths() -> frozenset[bytes]:
    """The raw paths that `--open-page` opens."""
    return frozenset(path.encode() for path in _files())


async def page(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """One file. Raises ApiError (404) for a name that is none, and for all of them with `--no-page`."""
    path: str = scope["path"]
    if not front.config.page:
        raise ApiError(404, f"{path[:200]}: the page is switched off (--no-page)", code="unsupported")
    file = _files().get(path)
    if file is None:
        raise ApiError(404, f"{path[:200]}: no such file", code="no_route")
    headers = [*_HEADERS, (b"etag", file.etag)]
    if file.etag in [tag.strip() for tag in (header(scope, b"if-none-match") or b"").split(b",")]:
        await send({"type": "http.response.start", "status": 304, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    body = file.body
    if b"gzip" in (header(scope, b"accept-encoding") or b""):
        body = file.gzipped
        headers.append((b"content-encoding", b"gzip"))
    await send_bytes(send, body, content_type=file.content_type, headers=headers)
