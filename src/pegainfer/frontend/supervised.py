"""An engine that may be replaced: the server keeps this handle while a dead engine gives way to a new one."""

from __future__ import annotations

import logging
from functools import partial

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError
from pegainfer.contract.event import EngineStats
from pegainfer.contract.handle import DoneSink, EngineInfo, EventSink
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.trace import StepSink
from pegainfer.frontend.engine_client import EngineClient

log = logging.getLogger(__name__)


class SupervisedEngine:
    """Implements contract.handle.EngineHandle over the engine of the moment.

    What a dead engine had in flight was failed by its own client; while there is no other, requests are
    refused with the reason of its death.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._loaded: dict[str, str] = {}  # folders of the adapters that the engine is to have, by name
        self.draining = False
        self._step_sink: StepSink | None = None

    def replace(self, client: EngineClient) -> None:
        """Another engine takes over. It loads the adapters that the one before had."""
        self._client = client
        for name, path in tuple(self._loaded.items()):
            client.load_adapter(name, path, partial(self._reloaded, name))
        if self._step_sink is not None:
            client.trace(self._step_sink)
        if self.draining:
            client.drain()

    async def wait_closed(self) -> None:
        """Returns when the connection to the engine of the moment has ended."""
        await self._client.wait_closed()

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        """Raises what EngineClient.submit raises."""
        self._client.submit(request, sink)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._client.cancel(request_id, index)

    def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
        def ended(error: PegaError | None) -> None:
            if error is None:
                self._loaded[name] = path
            done(error)

        self._client.load_adapter(name, path, ended, inplace)

    def unload_adapter(self, name: str, done: DoneSink) -> None:
        def ended(error: PegaError | None) -> None:
            if error is None:
                self._loaded.pop(name, None)
            done(error)

        self._client.unload_adapter(name, ended)

    def _reloaded(self, name: str, error: PegaError | None) -> None:
        if error is not None and not isinstance(error, EngineDeadError):
            log.error("adapter %s could not be loaded into the new engine: %s", name, error)
            self._loaded.pop(name, None)

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._client.adapters()

    def reset_prefix_cache(self, done: DoneSink) -> None:
        self._client.reset_prefix_cache(done)

    def trace(self, sink: StepSink | None) -> None:
        """A new engine after a failure is traced like the one before."""
        self._step_sink = sink
        self._client.trace(sink)

    def stats(self) -> EngineStats:
        return self._client.stats()

    def alive(self) -> bool:
        return self._client.alive()

    def death(self) -> EngineDeadError | None:
        return self._client.death()

    def drain(self) -> None:
        self.draining = True
        self._client.drain()

    def close(self) -> None:
        self._client.close()
