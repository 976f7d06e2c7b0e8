"""The factors of the adapters in a GPU's slots, side by side in arrays that the programs' launches read."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import RunnerInfo
from pegainfer.ops.adapters import AdaptedWeight
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind
from pegainfer.runner.adapters import AdapterReader, Laid
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.memory import StagingRing
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tensor import DeviceTensor, encode, item_bytes

Array = np.ndarray[Any, Any]
RING, RING_BYTES = 2, 4 << 20  # pinned memory on the way to the device


class CudaAdapters:
    """Factors by adapter index. An index that is free has rank 0 everywhere; its factors are not read.

    Installs run on any thread, on a stream of their own: steps go on meanwhile, and none of them uses the
    index.

    Args:
        states: the arrays by the programs' names.
    """

    def __init__(
        self, program: Program, weights: Collection[AdaptedWeight], info: RunnerInfo, device: Device
    ) -> None:
        """`program`: as ops/adapters.py rewrote it. Raises CudaError where memory is short."""
        self._weights = tuple(weights)
        given = {t.name: t for t in program.tensors(Kind.STATE)}
        bf16 = all(given[f"{w.key}.up"].dtype == "bf16" for w in self._weights)
        self._reader = AdapterReader(weights, info.max_adapter_rank, bf16=bf16)
        self._size, self._device = info.max_adapters, device
        # The ranks of all weights lie in one array [weights, adapters], so that one copy sets them.
        self._ranks = DeviceTensor.empty((len(self._weights), self._size), "i32", "ranks of adapters")
        self.states: dict[str, DeviceTensor] = {}
        for i, w in enumerate(self._weights):
            address = self._ranks.address + 4 * self._size * i
            self.states[f"{w.key}.ranks"] = DeviceTensor.at(address, (self._size,), "i32", self._ranks)
            for part in ("down", "up"):
                t = given[f"{w.key}.{part}"]
                self.states[t.name] = DeviceTensor.empty(t.sizes({}), t.dtype, "adapters")
        self._lock = threading.Lock()  # of the stream, the ring and what is installed
        self._stream = Stream()
        self._ring = StagingRing(RING, RING_BYTES, "adapters")
        self._stream.fill(self._ranks.address, 0, self._ranks.nbytes)
        self._stream.synchronize("adapters")
        self._installed: set[int] = set()

    def read(self, name: str, path: str) -> tuple[AdapterInfo, dict[str, Laid]]:
        """See AdapterRunner. The factors are encoded as the device holds them."""
        info, laid = self._reader.read(name, path)
        formats = {key: self.states[f"{key}.up"].dtype for key in laid}
        return info, {k: Laid(*(encode(part, formats[k]) for part in f)) for k, f in laid.items()}

    def install(self, index: int, laid: Mapping[str, Laid]) -> None:
        """Copies the factors and waits. Raises InvariantError for an index that is taken or unknown."""
        with self._lock:
            if not 0 <= index < self._size or index in self._installed:
                raise InvariantError(f"adapter index {index} is taken or does not exist")
            self._device.make_current()
            for w in self._weights:
                factors = laid.get(w.key)
                if factors is not None:
                    down = self.states[f"{w.key}.down"]
                    # Rows of an embedding's factor have room for the greatest rank.
                    row = down.shape[2] if w.base.embedding else factors.down.shape[1]
                    self._send(down, index, factors.down, row)
                    self._send(self.states[f"{w.key}.up"], index, factors.up, factors.up.shape[1])
            self._set_ranks(index, [laid[w.key].rank if w.key in laid else 0 for w in self._weights])
            self._stream.synchronize(f"adapter {index}")
            self._installed.add(index)

    def remove(self, index: int) -> None:
        """Raises InvariantError for an index without an adapter."""
        with self._lock:
            if index not in self._installed:
                raise InvariantError(f"adapter {index} is removed but not installed")
            self._device.make_current()
            self._set_ranks(index, [0] * len(self._weights))
            self._stream.synchronize(f"adapter {index}")
            self._installed.remove(index)

    def _send(self, state: DeviceTensor, index: int, part: Array, row: int) -> None:
        """Copies part [n, m] to the first m of each `row` elements of the index."""
        item = item_bytes(state.dtype)
        width, pitch = part.shape[1] * item, row * item
        address = state.address + index * state.nbytes // state.shape[0]
        each = RING_BYTES // width
        for start in range(0, part.shape[0], each):
            rows = part[start : start + each]
            host, data = self._ring.room(rows.nbytes)
            data[...] = rows.reshape(-1).view(np.uint8)
            self._stream.copy_rows(address + start * pitch, pitch, host, width, width, len(rows), host=True)
            self._ring.sent(self._stream)

    def _set_ranks(self, index: int, ranks: list[int]) -> None:
        host, data = self._ring.room(4 * len(ranks))
        data.view(np.int32)[...] = ranks
        address = self._ranks.address + 4 * index
        self._stream.copy_rows(address, 4 * self._size, host, 4, 4, len(ranks), host=True)
        self._ring.sent(self._stream)
