"""Several models in one server: which of them are loaded, and which requests wait for one.

unloaded ─► loading ─► loaded ─► unloading ─► unloaded
              │          ├ idle for longer than `keep_alive`, room is needed, or an admin asks: drained first
              │          └ its engine died: what it had in flight has failed, the next request loads it again
              └ failed: waiting requests get an error, and so do new ones for FAILED_SECONDS

Loads and unloads happen one after the other, so that memory is never promised twice. Everything runs on one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable

from pegainfer.contract.errors import PegaError
from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.fleet.fleet_member import FleetConfig, Loaded, Member, Place, State

log = logging.getLogger("pegainfer.fleet")

FAILED_SECONDS = 10.0  # after a load that failed, until the next request tries again
RETRY_SECONDS = 2.0  # Retry-After of a request that does not wait for its model
POLL_SECONDS = 0.05  # between looks at whether a draining model is idle


class Fleet:
    """The models of one server."""

    def __init__(self, members: Iterable[Member], config: FleetConfig, registry: Registry) -> None:
        """`registry`: of the generations of all models."""
        self.members = {member.name: member for member in members}
        self.config = config
        self.registry = registry
        self.draining = False
        self._changing = asyncio.Lock()  # held by the one load or unload that is under way

    def find(self, name: str | None) -> Member:
        """The model that a request names; None means the first one. Raises ApiError (404)."""
        if name is None:
            return next(iter(self.members.values()))
        member = self.members.get(name)
        if member is None:
            known = ", ".join(self.members)
            raise ApiError(
                404,
                f"model: expected {known:.2000}, got {name!r:.200}",
                param="model",
                code="model_not_found",
            )
        return member

    def any(self) -> Member:
        """A model that is loaded, where there is one: for what belongs to no model."""
        return next(iter(self._loaded()), self.find(None))

    @contextlib.asynccontextmanager
    async def using(self, member: Member) -> AsyncIterator[Loaded]:
        """The model, which is loaded first where it is not, and stays loaded within the context.

        Raises ApiError (503) where it cannot be loaded, or is not loaded and nobody may wait.
        """
        await self._enter(member)
        try:
            if self.draining:
                raise self._going()
            assert member.loaded is not None
            yield member.loaded
        finally:
            member.users -= 1
            member.last_used = time.monotonic()

    async def _enter(self, member: Member) -> None:
        """Waits until the model is loaded; the caller is one of its users then."""
        if member.state is State.LOADED:
            member.users += 1
            return
        self._check(member)
        if len(member.waiting) >= self.config.max_waiting:
            raise ApiError(
                503, f"too many requests wait for the model {member.name}; expected ≤ "
                f"{self.config.max_waiting}", code="overloaded", retry_after=RETRY_SECONDS,
            )  # fmt: skip
        place = Place()
        member.waiting.add(place)
        try:
            loading = self._start(member)
            if self.config.when_unloaded == "refuse":
                raise ApiError(
                    503, f"the model {member.name} is being loaded", code="model_loading",
                    retry_after=RETRY_SECONDS,
                )  # fmt: skip
            await asyncio.shield(loading)
            if not place.granted:
                raise self._failed(member)
        except BaseException:
            if place.granted:  # and nobody takes it
                member.users -= 1
            raise
        finally:
            member.waiting.discard(place)

    async def load(self, member: Member) -> None:
        """Loads a model as a request for it does, and waits. Raises ApiError (503)."""
        if member.state is not State.LOADED:
            self._check(member)
            await asyncio.shield(self._start(member))
            if member.failure:
                raise self._failed(member)

    async def unload(self, member: Member) -> None:
        """Lets its requests finish and frees its memory. Idempotent."""
        async with self._changing:
            await self._unload(member, "was asked to")

    async def reap(self) -> None:
        """Unloads what was idle for too long, until cancelled."""
        keep = self.config.keep_alive
        while keep >= 0:
            await asyncio.sleep(max(POLL_SECONDS, min(keep / 4, 5.0)))
            for member in self._loaded():
                if not member.busy and time.monotonic() - member.last_used > keep:
                    async with self._changing:
                        if not member.busy:
                            await self._unload(member, f"was idle for {keep:g} s")

    async def close(self) -> None:
        """Ends all engines at once, whatever they do."""
        self.draining = True
        tasks = [t for m in self.members.values() for t in (m.loading, m.watch) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = [m.loaded for m in self.members.values() if m.loaded is not None]
        await asyncio.gather(*(loaded.close() for loaded in found), return_exceptions=True)

    # ------------------------------------------------------------------ loading

    def _check(self, member: Member) -> None:
        """Raises ApiError (503) where no load is to be tried now."""
        if self.draining:
            raise self._going()
        if member.failure and time.monotonic() - member.failed_at < FAILED_SECONDS:
            raise self._failed(member)

    def _going(self) -> ApiError:
        return ApiError(503, "the server is shutting down", code="draining", retry_after=5.0)

    def _failed(self, member: Member) -> ApiError:
        """The log has the reason, which may name paths of this machine."""
        message = f"the model {member.name} could not be loaded; the server's log says why"
        return ApiError(503, message, code="model_failed", retry_after=FAILED_SECONDS)

    def _start(self, member: Member) -> asyncio.Task[None]:
        if member.loading is None:
            member.failure = ""
            member.loading = asyncio.create_task(self._load(member))
        return member.loading

    async def _load(self, member: Member) -> None:
        """Sets `loaded` or `failure`."""
        try:
            async with self._changing:
                started = time.monotonic()
                member.nbytes = await asyncio.to_thread(member.plan)
                await self._make_room(member)
                member.state = State.LOADING
                member.loaded = await member.load(member)
                member.state, member.last_used = State.LOADED, time.monotonic()
                for place in member.waiting:  # so that nothing unloads it before they have used it
                    place.granted = True
                member.users += len(member.waiting)
                member.loads += 1
                member.load_seconds += time.monotonic() - started
                member.watch = asyncio.create_task(self._watch(member, member.loaded))
                log.info("model %s loaded in %.1f s", member.name, time.monotonic() - started)
        except Exception as error:  # of whatever kind: it must harm no other model
            member.state = State.UNLOADED
            member.failure, member.failed_at = f"{error}" or type(error).__name__, time.monotonic()
            log.error(
                "model %s could not be loaded: %s", member.name, member.failure,
                exc_info=None if isinstance(error, PegaError | OSError) else error,
            )  # fmt: skip
        finally:
            member.loading = None

    async def _make_room(self, member: Member) -> None:
        """Unloads models, idle ones first and those used longest ago, until there is room.

        A busy one takes no more requests and finishes those that it has. Raises PegaError where all of the
        memory is too small.
        """
        if member.nbytes > self.config.memory:
            raise PegaError(
                "the model needs more memory than all models may have",
                expected=f"≤ {self.config.memory >> 20} MiB", got=f"{member.nbytes >> 20} MiB",
                remedy="raise --models-memory, or lower --kv-cache-memory or --max-model-len",
            )  # fmt: skip
        while loaded := self._loaded():
            full = 0 < self.config.max_loaded <= len(loaded)
            if not full and sum(m.nbytes for m in loaded) + member.nbytes <= self.config.memory:
                return
            victim = min(loaded, key=lambda m: (m.busy, m.last_used))
            await self._unload(victim, f"makes room for {member.name}")

    def _loaded(self) -> list[Member]:
        return [m for m in self.members.values() if m.state is State.LOADED]

    async def _unload(self, member: Member, why: str) -> None:
        """The caller holds `_changing`."""
        if member.state is not State.LOADED or member.loaded is None:
            return
        member.state = State.UNLOADING
        loaded = member.loaded
        while member.busy and loaded.front.engine.alive():
            await asyncio.sleep(POLL_SECONDS)
        if member.watch is not None:
            member.watch.cancel()
        await self._close(member, loaded)
        log.info("model %s unloaded: it %s", member.name, why)

    async def _close(self, member: Member, loaded: Loaded) -> None:
        """A fault of it must neither end the reaper nor hold up the next load."""
        try:
            await loaded.close()
        except Exception:
            log.exception("the engine of model %s did not end in order", member.name)
        member.state, member.loaded = State.UNLOADED, None

    async def _watch(self, member: Member, loaded: Loaded) -> None:
        """Forgets a model whose engine has died; the next request for it loads it again."""
        reason = await loaded.ended()
        log.error("the engine of model %s has ended: %s", member.name, reason)
        if member.state is not State.LOADED:
            return  # whoever unloads it closes it
        member.state = State.UNLOADING  # from now on requests wait for the next one
        async with self._changing:
            await self._close(member, loaded)
