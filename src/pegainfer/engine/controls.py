"""Calls that change the engine beside requests: load and unload adapters, reset the prefix cache.

load ─► files read on a thread ─► policy: requests may name it ─► done
unload ─► policy: no more requests ─► done …the last request with it ends… ─► its slot and memory are free

Which adapters are in the device's slots is the policy's choice; its loads run beside the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.codec import Call, LoadAdapter, ResetPrefixCache, UnloadAdapter
from pegainfer.contract.errors import PegaError
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.step import Runner, StepPolicy
from pegainfer.engine.adapter_loader import AdapterLoaded, AdapterLoader, AdapterRead
from pegainfer.engine.pipeline import Clock
from pegainfer.engine.sink import EngineSink

Control = Call | AdapterRead | AdapterLoaded


class Controls:
    """Obeys calls on the engine's thread; adapters are read and installed on others."""

    def __init__(
        self,
        runner: Runner,
        policy: StepPolicy,
        sink: EngineSink,
        deliver: Callable[[AdapterRead | AdapterLoaded], None],
        clock: Clock,
    ) -> None:
        """`deliver` puts a message into the loop's inbox; any thread may call it."""
        self._policy = policy
        self._sink = sink
        self._clock = clock
        self._loader = AdapterLoader(runner, deliver)
        self._has_slots = runner.info.max_adapters > 0
        self._adapters: dict[str, AdapterInfo] = {}  # by name
        self._replacing: dict[int, bool] = {}  # by call
        self._dropped: Counter[bytes] = Counter()  # digests of adapters without a name, but with sequences
        self.num_loading = 0

    def obey(self, message: Control) -> list[TokenEvent]:
        """Does what a call asks; its end goes to the sink, now or once the adapter is read.

        Returns the finishes of requests whose adapter cannot be loaded.
        """
        error: PegaError | None = None
        if isinstance(message, AdapterLoaded):
            self.num_loading -= 1
            return self._policy.end_adapter_load(message.index, message.error, self._clock())
        try:
            match message:
                case LoadAdapter():
                    self._loader.read(message.call, message.name, message.path)
                    self._replacing[message.call] = message.inplace
                    return []
                case AdapterRead():
                    self._loaded(message)
                case UnloadAdapter():
                    if self._unload(message.name, message.call):
                        return []
                case ResetPrefixCache():
                    self._policy.reset_prefix_cache()
        except PegaError as raised:
            error = raised
        self._sink.done(message.call, error)
        return []

    def serve(self) -> None:
        """Starts the policy's loads, and frees what unloaded adapters leave. After each plan and commit."""
        if not self._has_slots:
            return
        if self._dropped:
            for gone in self._policy.take_unloaded_adapters():
                self._dropped -= Counter([gone.digest])
                if gone.digest not in {*self._dropped, *(a.digest for a in self._adapters.values())}:
                    self._loader.forget(gone.digest)
        for load in self._policy.take_adapter_loads():
            self.num_loading += 1
            self._loader.load(load)

    def close(self) -> None:
        """No thread works on the runner any more."""
        self._loader.close()

    def _loaded(self, message: AdapterRead) -> None:
        """An adapter was read, for a load or before its unload. Raises PegaError."""
        replace = self._replacing.pop(message.call, None)
        if replace is None:
            return  # an unload ends in any case
        if isinstance(message.result, PegaError):
            raise message.result
        info = message.result
        before = self._adapters.get(info.name)
        if before is not None and replace:
            self._drop(before, None)
        self._policy.add_adapter(info)
        self._adapters[info.name] = info
        self._publish()

    def _unload(self, name: str, call: int) -> bool:
        """Whether the call ends later, when files that may go away were read."""
        info = self._adapters.get(name, AdapterInfo(name=name, path="", digest=b""))
        reads = self._drop(info, call)
        self._publish()
        return reads

    def _drop(self, info: AdapterInfo, call: int | None) -> bool:
        """Takes an adapter's name. Whether it is read first, for requests that wait. Raises RequestError."""
        waits = self._policy.drop_adapter(info.name)
        del self._adapters[info.name]
        self._dropped[info.digest] += 1
        if waits:
            self._loader.pin(call, info)
        return waits

    def _publish(self) -> None:
        self._sink.adapters_changed(list(self._adapters.values()))
