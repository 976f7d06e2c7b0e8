"""The generations under way: for draining, aborting, and keeping silent streams alive."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from pegainfer.contract.errors import RequestError


class Live(Protocol):
    """What is asked of a generation under way."""

    id: str  # public, without its route's prefix
    model: str  # the served name of the model that answers

    @property
    def tenant(self) -> str: ...

    def abort(self) -> None: ...

    def poke(self, now: float, silence: float) -> None: ...


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


class Registry(msgspec.Struct):
    """Every generation that is not closed, by its tenant and public id."""

    live: dict[tuple[str, str], Live] = msgspec.field(default_factory=dict)
    idle: asyncio.Event = msgspec.field(default_factory=_set_event)  # set while there is none
    busy_since: float = 0.0  # CLOCK_MONOTONIC seconds when it last became non-empty

    def add(self, generation: Live) -> None:
        """Raises RequestError where its tenant has one with this id."""
        key = generation.tenant, generation.id
        if key in self.live:
            raise RequestError("a request with this id is running", param="request_id", got=generation.id)
        if not self.live:
            self.busy_since = time.monotonic()
        self.live[key] = generation
        self.idle.clear()

    def remove(self, generation: Live) -> None:
        """Forgets one that is closed. Idempotent."""
        self.live.pop((generation.tenant, generation.id), None)
        if not self.live:
            self.idle.set()

    def find(self, id: str, tenant: str, *, others: bool) -> Live | None:
        """The tenant's generation of this id; with `others`, anybody's where the tenant has none."""
        own = self.live.get((tenant, id))
        if own is not None or not others:
            return own
        return next((g for g in self.live.values() if g.id == id), None)


class KeepAlive:
    """Pokes silent generations from one timer for all of them; the timer rests while there are none."""

    def __init__(self, registry: Registry, seconds: float) -> None:
        self._registry = registry
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Call it whenever a generation starts."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds / 2, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = time.monotonic()
        for generation in list(self._registry.live.values()):
            generation.poke(now, self._seconds)
        if self._registry.live:
            self.arm()
