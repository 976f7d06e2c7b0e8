"""Calls that change the engine beside requests: load and unload adapters, reset the prefix cache.

load ─► read on a thread of its own ─► the loop's inbox ─► policy: an index ─► runner: installed ─► done
unload ─► policy: no more requests ─► done …the last request with it ends… ─► runner: removed
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pegainfer.contract.adapter import AdapterInfo, AdapterRunner
from pegainfer.contract.codec import Call, LoadAdapter, ResetPrefixCache, UnloadAdapter
from pegainfer.contract.errors import EngineDeadError, PegaError, UnsupportedError
from pegainfer.contract.step import Runner, StepPolicy
from pegainfer.engine.sink import EngineSink

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterRead:
    """An adapter's files were read, or could not be."""

    call: int
    result: tuple[AdapterInfo, Any] | PegaError


class Controls:
    """Obeys calls on the engine's thread; only the reading of adapters happens on others."""

    def __init__(
        self,
        runner: Runner,
        policy: StepPolicy,
        sink: EngineSink,
        deliver: Callable[[AdapterRead], None],
    ) -> None:
        """`deliver` puts a message into the loop's inbox; any thread may call it."""
        self._runner = runner
        self._policy = policy
        self._sink = sink
        self._deliver = deliver
        self._adapters: dict[str, AdapterInfo] = {}
        self._num_dropped = 0  # adapters that were unloaded and are still in the runner

    def obey(self, message: Call | AdapterRead) -> None:
        """Does what a call asks; its end goes to the sink, now or once the adapter is read."""
        error: PegaError | None = None
        try:
            match message:
                case LoadAdapter():
                    self._read(message)
                    return
                case AdapterRead():
                    self._install(message)
                case UnloadAdapter():
                    self._unload(message.name)
                case ResetPrefixCache():
                    self._policy.reset_prefix_cache()
        except PegaError as raised:
            error = raised
        self._sink.done(message.call, error)

    def collect(self) -> None:
        """Removes adapters from the runner that were dropped and that nothing uses any more."""
        if self._num_dropped:
            for index in self._policy.take_free_adapters():
                self._adapter_runner().remove_adapter(index)
                self._num_dropped -= 1

    def _adapter_runner(self) -> AdapterRunner:
        runner = self._runner
        if not runner.info.max_adapters or not isinstance(runner, AdapterRunner):
            raise UnsupportedError("this engine serves no adapters", remedy="start it with adapters enabled")
        return runner

    def _read(self, message: LoadAdapter) -> None:
        runner = self._adapter_runner()

        def read() -> None:
            result: tuple[AdapterInfo, Any] | PegaError
            try:
                result = runner.read_adapter(message.name, message.path)
            except PegaError as error:
                result = error
            except Exception as error:
                log.exception("an adapter could not be read")
                result = PegaError("the adapter could not be read", got=type(error).__name__)
            try:
                self._deliver(AdapterRead(message.call, result))
            except EngineDeadError:
                log.debug("an adapter was read after the engine's end")

        threading.Thread(target=read, name="adapter", daemon=True).start()

    def _install(self, message: AdapterRead) -> None:
        if isinstance(message.result, PegaError):
            raise message.result
        info, adapter = message.result
        self.collect()
        index = self._policy.add_adapter(info)
        try:
            self._adapter_runner().install_adapter(index, adapter)
        except BaseException:
            self._policy.drop_adapter(info.name)
            self._policy.take_free_adapters()  # only this one: no request has named it yet
            raise
        self._adapters[info.name] = info
        self._publish()

    def _unload(self, name: str) -> None:
        self._policy.drop_adapter(name)
        del self._adapters[name]
        self._num_dropped += 1
        self.collect()
        self._publish()

    def _publish(self) -> None:
        self._sink.adapters_changed(list(self._adapters.values()))
