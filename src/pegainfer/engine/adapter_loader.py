"""Reads adapters and brings them into the device's slots, on threads beside the engine's.

disk ─ read ─► the host's memory, the least recently used first out ─ install ─► a slot
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from pegainfer.contract.adapter import AdapterInfo, AdapterLoad, AdapterRunner
from pegainfer.contract.errors import EngineDeadError, ModelFileError, PegaError, UnsupportedError
from pegainfer.contract.step import Runner

log = logging.getLogger(__name__)


class AdapterRead(msgspec.Struct, frozen=True):
    """An adapter's files were read for a call, or could not be."""

    call: int
    result: AdapterInfo | PegaError


class AdapterLoaded(msgspec.Struct, frozen=True):
    """A load has ended; the slot holds the adapter, or with an error none."""

    index: int
    error: PegaError | None


class HostMemory:
    """Adapters as `read_adapter` gave them, by digest. For any thread."""

    def __init__(self, size: int) -> None:
        """`size`: adapters that are kept, beside those that `pin` names."""
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._pinned: dict[bytes, Any] = {}

    def get(self, digest: bytes) -> Any | None:
        """An adapter, which counts as used now; None for one that is not here."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest, self._pinned.get(digest))

    def put(self, digest: bytes, adapter: Any, *, pin: bool = False) -> None:
        """`pin`: keeps it until `forget`."""
        with self._lock:
            if pin:
                self._pinned[digest] = adapter
                return
            self._kept[digest] = adapter
            self._kept.move_to_end(digest)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        with self._lock:
            self._kept.pop(digest, None)
            self._pinned.pop(digest, None)


class AdapterLoader:
    """Serves one engine. All methods but the threads' own parts are for the engine's thread."""

    def __init__(self, runner: Runner, deliver: Callable[[AdapterRead | AdapterLoaded], None]) -> None:
        """`deliver` puts a message into the engine's inbox; any thread may call it."""
        self._runner = runner
        self._deliver = deliver
        self._memory = HostMemory(max(runner.info.max_host_adapters, runner.info.max_adapters))
        self._installed: set[int] = set()
        self._device = threading.Lock()  # of what the slots hold, and of `_closed`
        self._closed = False

    def read(self, call: int, name: str, path: str) -> None:
        """Reads an adapter into the host's memory; `AdapterRead` follows. Raises UnsupportedError."""
        self._adapter_runner()

        def work() -> AdapterInfo:
            return self._read(name, path)[0]

        self._start(work, lambda result: AdapterRead(call, result))

    def load(self, load: AdapterLoad) -> None:
        """Installs an adapter, which is read again where the host has it no more; `AdapterLoaded` follows."""

        def work() -> None:
            self._install(load.index, self._again(load.info))

        self._start(work, lambda error: AdapterLoaded(load.index, error))

    def pin(self, call: int | None, info: AdapterInfo) -> None:
        """Keeps an adapter in the host's memory until `forget`: its files may go away.

        `AdapterRead` follows for a call.
        """

        def work() -> AdapterInfo:
            self._memory.put(info.digest, self._again(info), pin=True)
            return info

        self._start(work, lambda result: None if call is None else AdapterRead(call, result))

    def forget(self, digest: bytes) -> None:
        """No adapter of this content has a name or a sequence any more."""
        self._memory.forget(digest)

    def close(self) -> None:
        """Returns when no thread is at work on the device, and none will be."""
        with self._device:
            self._closed = True

    def _adapter_runner(self) -> AdapterRunner:
        runner = self._runner
        if not runner.info.max_adapters or not isinstance(runner, AdapterRunner):
            raise UnsupportedError("this engine serves no adapters", remedy="start it with adapters enabled")
        return runner

    def _start(self, work: Callable[[], Any], message: Callable[[Any], Any]) -> None:
        def run() -> None:
            try:
                result = work()
            except PegaError as error:
                result = error
            except Exception as error:
                log.exception("an adapter could not be loaded")
                result = PegaError("the adapter could not be loaded", got=type(error).__name__)
            delivered = message(result)
            if delivered is None:
                return
            try:
                self._deliver(delivered)
            except EngineDeadError:
                log.debug("an adapter was loaded after the engine's end")

        threading.Thread(target=run, name="adapter", daemon=True).start()

    # On the threads

    def _read(self, name: str, path: str) -> tuple[AdapterInfo, Any]:
        info, adapter = self._adapter_runner().read_adapter(name, path)
        self._memory.put(info.digest, adapter)
        return info, adapter

    def _again(self, info: AdapterInfo) -> Any:
        """The adapter from the host's memory, else from its files, which must be as they were."""
        adapter = self._memory.get(info.digest)
        if adapter is not None:
            return adapter
        found, adapter = self._read(info.name, info.path)
        if found.digest != info.digest:
            raise ModelFileError(
                "an adapter's files were changed after it was loaded",
                where=info.path,
                remedy="load it again with load_inplace",
            )
        return adapter

    def _install(self, index: int, adapter: Any) -> None:
        with self._device:
            if self._closed:
                raise EngineDeadError("the engine was closed")
            runner = self._adapter_runner()
            if index in self._installed:
                self._installed.remove(index)
                runner.remove_adapter(index)
            runner.install_adapter(index, adapter)
            self._installed.add(index)
