"""`serve` with several models: the HTTP front in this process, an engine's process for each loaded model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from pegainfer import __version__
from pegainfer.app.observers import observing
from pegainfer.cli.fleet_flags import FleetFlags
from pegainfer.cli.machine import process_age
from pegainfer.cli.running import Note, noted
from pegainfer.cli.serving import both, ready_lines
from pegainfer.cli.supervisor import Supervisor
from pegainfer.cli.target import Target, load_text_side
from pegainfer.contract.observation import Observer
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.connection.server import run_loop
from pegainfer.runtime.control_groups import available_memory
from pegainfer.runtime.priority import at_low_priority

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from pegainfer.frontend.engine_client import EngineClient
    from pegainfer.frontend.http.answer.registry import Registry
    from pegainfer.frontend.http.app import App
    from pegainfer.frontend.http.fleet.fleet_member import Loaded, Member
    from pegainfer.frontend.http.front import Front
    from pegainfer.frontend.http.responses_api.store import ResponseStore

MEMORY_SHARE = 0.9  # of what is free when the server starts
# Nice value of threads that load tokenizers and templates. The event loop waits while such a thread holds the
# interpreter's lock, so the thread still needs half the CPU share of one with the usual priority.
TEXT_NICE = 3
PROCESS_BYTES = 192 << 20  # of an engine's process beside weights and KV cache, and of the model's text side


def run_fleet(targets: Sequence[Target], http: HttpConfig, flags: FleetFlags, listener: socket.socket) -> int:
    """Serves the models until a signal ends it, and returns the exit code."""
    logging.getLogger("pegainfer.fleet").setLevel(logging.INFO)  # log every load and unload
    with observing(http.access_log, http.otlp_traces_endpoint) as observers, noted() as note:
        return run_loop(_run(targets, http, flags, listener, observers, note))


async def _run(
    targets: Sequence[Target],
    http: HttpConfig,
    flags: FleetFlags,
    listener: socket.socket,
    observers: Sequence[Observer],
    note: Note,
) -> int:
    from pegainfer.frontend.http.answer.registry import Registry
    from pegainfer.frontend.http.connection.server import preload, run_server
    from pegainfer.frontend.http.fleet.fleet import Fleet
    from pegainfer.frontend.http.fleet.fleet_app import FleetApp
    from pegainfer.frontend.http.fleet.fleet_member import FleetConfig, Member
    from pegainfer.frontend.http.front import new_store

    preload()
    memory = flags.models_memory or int(available_memory() * MEMORY_SHARE)
    registry, store = Registry(), new_store(http)
    models = [_Model(target, http, registry, store) for target in targets]
    config = FleetConfig(
        memory=memory, keep_alive=flags.keep_alive, max_loaded=flags.max_loaded_models,
        when_unloaded=flags.when_unloaded, max_waiting=http.max_queued_requests,
    )  # fmt: skip
    fleet = Fleet([Member(m.target.spec.name, plan=m.plan, load=m.load) for m in models], config, registry)

    def on_ready(url: str) -> None:
        device = targets[0].spec.engine.backend if targets[0].model is not None else "null"
        note.write(url, list(fleet.members), device, 0)
        print(
            f"pegainfer {__version__}: {len(models)} models in up to {memory >> 20} MiB, each loaded when it "
            "is first asked for:",
            *(f"  {name}" for name in fleet.members),
            f"ready after {process_age():.2f} s",
            *ready_lines(url, http),
            sep="\n",
            flush=True,
        )

    reaping = asyncio.ensure_future(fleet.reap())
    try:
        return await run_server(FleetApp(fleet, http, observers), [listener], http, on_ready=on_ready)
    finally:
        reaping.cancel()
        await fleet.close()


class _Model:
    """One model that may be loaded."""

    def __init__(self, target: Target, http: HttpConfig, registry: Registry, store: ResponseStore) -> None:
        self.target = structs.replace(target, spec=structs.replace(target.spec, gentle=True))
        self._http = http
        self._registry = registry
        self._store = store

    def plan(self) -> int:
        """Bytes that it will take; its KV cache gets no more than was planned.

        Raises ConfigError, ModelFileError, UnsupportedError.
        """
        spec = self.target.spec
        if self.target.model is None:
            return PROCESS_BYTES
        from pegainfer.app.library import examine

        facts = examine(self.target.model.path, spec.engine, spec.scheduler)
        if spec.engine.kv_cache_memory is None and facts.cache_bytes:
            engine = dataclasses.replace(spec.engine, kv_cache_memory=facts.cache_bytes)
            self.target = structs.replace(self.target, spec=structs.replace(spec, engine=engine))
        cache = facts.cache_bytes or spec.engine.kv_cache_memory or 0  # a GPU's is not divided yet
        return facts.weight_bytes + cache + PROCESS_BYTES

    async def load(self, member: Member) -> Loaded:
        """Starts an engine and reads the text side beside it. Raises PegaError."""
        from pegainfer.frontend.http.app import Shared, create_app

        supervisor = Supervisor(self.target.spec, restarts=1)
        supervisor.start()
        try:
            text = asyncio.ensure_future(
                asyncio.to_thread(at_low_priority, partial(load_text_side, self.target), TEXT_NICE)
            )
            client, side = await both(asyncio.ensure_future(supervisor.connect()), text)
            app = create_app(
                client, side.tokenizer, side.template, self._http, names=(member.name,),
                generation=side.generation, pooling=side.pooling,
                shared=Shared(self._registry, member.metrics, self._store),
            )  # fmt: skip
        except BaseException:
            await asyncio.shield(asyncio.to_thread(supervisor.stop))
            raise
        return _Loaded(supervisor, client, app)


@dataclass(frozen=True)
class _Loaded:
    """Implements fleet_member.Loaded."""

    supervisor: Supervisor
    client: EngineClient
    app: App

    @property
    def front(self) -> Front:
        return self.app.front

    @property
    def routes(self) -> ASGIApp:
        return self.app.routes

    async def ended(self) -> str:
        await self.client.wait_closed()
        return str(await self.supervisor.explain())

    async def close(self) -> None:
        self.client.close()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(asyncio.to_thread(self.supervisor.stop))
        await asyncio.to_thread(self.front.workers.close)
