"""Which endpoint a path leads to: literal paths, parameters, slashes, unknown paths and methods."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.connection.dispatch import Dispatch
from tests.support.asgi import run


class Names:
    """Answers with its name and the path's parameters."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = f"{self._name} {scope['path']} {scope.get('path_params', {})}"
        await PlainTextResponse(text)(scope, receive, send)


async def unknown(request: Request, exc: Any) -> Response:
    return PlainTextResponse("none", exc.status_code)


ROUTES = (
    Route("/a", Names("post"), methods=["POST"]),
    Route("/a", Names("get"), methods=["GET"]),
    Route("/a/{id}", Names("one"), methods=["GET"]),
    Route("/", Names("root"), methods=["GET"]),
    Mount("/m", Names("mounted")),
)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/a", 200, "post /a {}"),
        ("GET", "/a", 200, "get /a {}"),
        ("HEAD", "/a", 200, ""),
        ("POST", "/a/", 200, "post /a {}"),
        ("POST", "/a//", 200, "post /a {}"),
        ("GET", "/", 200, "root / {}"),
        ("GET", "//", 200, "root / {}"),
        ("GET", "/a/5", 200, "one /a/5 {'id': '5'}"),
        ("GET", "/a/5/", 200, "one /a/5 {'id': '5'}"),
        ("GET", "/m/x", 200, "mounted /m/x {}"),
        ("DELETE", "/a", 405, "none"),
        ("POST", "/a/5", 405, "none"),
        ("GET", "/b", 404, "none"),
    ],
)
def test_a_request_reaches_its_endpoint(method: str, path: str, status: int, text: str) -> None:
    async def main() -> None:
        transport = httpx.ASGITransport(Dispatch(ROUTES, unknown))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            answer = await http.request(method, "http://x" + path)
        assert answer.status_code == status
        if method != "HEAD":
            assert answer.text == text

    run(main)
