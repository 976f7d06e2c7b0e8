"""From a request's path to its endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send


class Dispatch:
    """Routes as one ASGI application. It ignores a slash at a path's end, as a redirect loses bodies.

    Nearly all requests have a method and path that a route names literally. Those go straight to its
    endpoint: Starlette would compare the path with one pattern after another, behind two layers of error
    handling that endpoints here do not need. Starlette serves paths with parameters and unknown ones.
    """

    def __init__(self, routes: Sequence[BaseRoute], no_route: ExceptionHandler) -> None:
        """
        Args:
            routes: endpoints of literal paths must answer their own exceptions.
            no_route: answers the HTTPException for a path or method that no route has.
        """
        self._starlette = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
        self._starlette.router.redirect_slashes = False
        self._endpoints: dict[tuple[str, str], ASGIApp] = {}
        for route in routes:
            if isinstance(route, Route) and "{" not in route.path:
                for method in route.methods or ():
                    self._endpoints.setdefault((method, route.path), route.app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path.endswith("/") and path != "/":
                path = path.rstrip("/") or "/"
                scope = {**scope, "path": path}
            endpoint = self._endpoints.get((scope["method"], path))
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await self._starlette(scope, receive, send)
