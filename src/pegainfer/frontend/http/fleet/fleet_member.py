"""One model of a server with several, and what the server may hold of them; fleet.py says what happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from starlette.types import ASGIApp

from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.observation.metrics import FrontMetrics


class State(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class Loaded(Protocol):
    """A model that answers requests."""

    @property
    def front(self) -> Front: ...

    @property
    def routes(self) -> ASGIApp:
        """All routes of the model, behind no key."""

    async def ended(self) -> str:
        """Returns when its engine has died, with the reason."""

    async def close(self) -> None:
        """Ends the engine; returns once its memory is free. Idempotent."""


class Place:
    """Of a request that waits for its model."""

    granted = False  # it counts as a user of the model


@dataclass(eq=False)
class Member:
    """One model of the server, loaded or not. Mutated by its Fleet alone.

    Args:
        name: that requests use.
        plan: returns the bytes that it will take; raises PegaError where it cannot be served. Off the loop.
        load: loads it, with so many bytes planned for it.
    """

    name: str
    plan: Callable[[], int]
    load: Callable[[Member], Awaitable[Loaded]]
    metrics: FrontMetrics = field(default_factory=FrontMetrics)
    created: int = field(default_factory=lambda: int(time.time()))
    state: State = State.UNLOADED
    loaded: Loaded | None = None
    nbytes: int = 0  # planned; 0 before it was
    users: int = 0  # requests that are being answered by it
    waiting: set[Place] = field(default_factory=set)  # requests that it is loaded for
    last_used: float = 0.0  # CLOCK_MONOTONIC seconds
    failure: str = ""  # why the last load failed
    failed_at: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0  # of all loads
    loading: asyncio.Task[None] | None = None
    watch: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether it answers a request, or a response in the background."""
        if self.users:
            return True
        front = None if self.loaded is None else self.loaded.front
        return front is not None and any(g.model == self.name for g in front.registry.live.values())


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """
    Args:
        memory: bytes that all loaded models may take together.
        keep_alive: seconds without a request until a model is unloaded; below 0: never.
        max_loaded: models that may be loaded at once; 0: as many as memory holds.
        max_waiting: requests that may wait for one model.
        when_unloaded: whether a request waits for its model, or gets a 503 while that is loaded.
    """

    memory: int
    keep_alive: float = 300.0
    max_loaded: int = 0
    max_waiting: int = 1024
    when_unloaded: Literal["wait", "refuse"] = "wait"
