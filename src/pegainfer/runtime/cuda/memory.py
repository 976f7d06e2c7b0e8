"""Device and pinned memory, owned by objects."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.driver import CudaError, call
from pegainfer.runtime.cuda.stream import Event, Stream

ALIGN = 256  # bytes: what cuMemAlloc gives, and more than any vector or TMA access needs
Array = np.ndarray[Any, Any]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class DeviceBuffer:
    """Bytes on the device, freed by `free`, with the object or when the device is closed."""

    def __init__(self, nbytes: int, what: str) -> None:
        """`what` names the use in errors. Raises CudaError where memory is short."""
        self.nbytes = nbytes
        self.address = 0
        if nbytes:
            try:
                self.address = int(call("cuMemAlloc", nbytes, where=f"{what}, {nbytes} bytes"))
            except CudaError as e:
                if e.code != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                free, total = call("cuMemGetInfo")
                raise CudaError(
                    f"too little GPU memory for {what}", code=e.code,
                    expected=f"{nbytes / 2**20:.0f} MiB free",
                    got=f"{free / 2**20:.0f} of {total / 2**20:.0f} MiB",
                    remedy="lower --max-model-len, --max-num-seqs or --kv-cache-memory, or free the GPU",
                ) from None  # fmt: skip
            Device.owns(self)

    def free(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            call("cuMemFree", address)

    def __del__(self) -> None:
        try:
            self.free()
        except Exception:  # the context may be gone at interpreter exit, and the memory with it
            self.address = 0


class PinnedBuffer:
    """Page-locked host memory that the copy engines read and write directly."""

    def __init__(self, nbytes: int, what: str) -> None:
        self.nbytes = nbytes
        self.address = int(call("cuMemHostAlloc", nbytes, 0, where=f"{what}, {nbytes} bytes pinned"))
        raw = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.bytes: Array = np.ctypeslib.as_array(raw)

    def free(self) -> None:
        """Views of `bytes` must no longer be used."""
        if self.address:
            address, self.address = self.address, 0
            self.bytes = self.bytes[:0]
            call("cuMemFreeHost", address)

    def __del__(self) -> None:
        try:
            self.free()
        except Exception:  # as in DeviceBuffer
            self.address = 0


class StagingRing:
    """Pinned slots in turn. A slot is handed out again only when the copy that last read it has ended."""

    def __init__(self, slots: int, slot_bytes: int, what: str) -> None:
        self.slot_bytes = slot_bytes
        self._stride = aligned(slot_bytes)
        self._buffer = PinnedBuffer(max(1, slots * self._stride), what)
        self._events: list[Event | None] = [None] * slots
        self._next = 0
        self._taken = -1
        self._used = slot_bytes  # of the slot taken last; none yet

    def room(self, nbytes: int) -> tuple[int, Array]:
        """(host address, bytes) for so many bytes: behind the last ones where they fit, or in the next slot,
        whose last copy is then waited for. Then call `sent`. For rings that `take` is not used on.

        Args:
            nbytes: at most slot_bytes.
        """
        start = aligned(self._used)
        if start + nbytes > self.slot_bytes:
            self.take()
            start = 0
        self._used = start + nbytes
        start += self._taken * self._stride
        return self._buffer.address + start, self._buffer.bytes[start : start + nbytes]

    def take(self) -> tuple[int, int, Array]:
        """(number, host address, bytes) of the next slot; waits for its last copy. Then call `sent`."""
        index = self._next
        self._next = (index + 1) % len(self._events)
        event = self._events[index]
        if event is not None:
            event.wait("staging ring")
        self._taken = index
        start = index * self._stride
        return index, self._buffer.address + start, self._buffer.bytes[start : start + self.slot_bytes]

    def sent(self, stream: Stream) -> None:
        """The slot taken last is in use until what is on the stream now has ended."""
        event = self._events[self._taken]
        if event is None:
            event = self._events[self._taken] = Event()
        event.record(stream)

    def idle(self) -> bool:
        """Whether no slot is in use any more. Raises what the work before a copy raised."""
        return all(event is None or event.done() for event in self._events)

    def free(self) -> None:
        """Once it is idle. Views of its slots must no longer be used."""
        self._buffer.free()
