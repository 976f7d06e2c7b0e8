"""Copies between GPU blocks and host memory, beside the steps: each thread has a stream of its own.

Nothing here waits for the stream of the steps. A block is copied out only when the host knows its content,
and copied into only when no plan in flight names it, so the steps concerned have ended on the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pegainfer.contract.step import RunnerInfo
from pegainfer.kv.device.cuda_pool import CudaPools
from pegainfer.kv.device.store import BlockStore, Bytes
from pegainfer.kv.device.transfers import Transfers
from pegainfer.kv.layout import group_bytes
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.memory import PinnedBuffer
from pegainfer.runtime.cuda.stream import Stream


class CudaCopies:
    """Implements transfers.DeviceCopies. A block is one copy for each part, whatever its number of layers."""

    def __init__(self, pools: CudaPools, device: Device) -> None:
        self._pools = pools
        self._device = device
        self._threads = threading.local()

    def _stream(self) -> Stream:
        """This thread's; Raises CudaError."""
        stream: Stream | None = getattr(self._threads, "stream", None)
        if stream is None:
            self._device.make_current()
            stream = self._threads.stream = Stream()
        return stream

    def gather(self, group: int, block: int, out: Bytes) -> None:
        stream, at = self._stream(), out.ctypes.data
        for address, nbytes in self._pools.places[group]:
            stream.download(at, address + block * nbytes, nbytes, "KV block to host memory")
            at += nbytes

    def scatter(self, group: int, block: int, data: Bytes) -> None:
        stream, at = self._stream(), data.ctypes.data
        for address, nbytes in self._pools.places[group]:
            stream.upload(address + block * nbytes, at, nbytes, "KV block from host memory")
            at += nbytes

    def finish(self) -> None:
        """Raises CudaError."""
        self._stream().synchronize("KV blocks")


def cuda_transfers(
    pools: CudaPools,
    device: Device,
    info: RunnerInfo,
    stores: Sequence[BlockStore],
    free: Callable[[], None] | None,
) -> Transfers:
    """Transfers between `pools` and the stores of `info.tiers`; see Transfers."""
    return Transfers(CudaCopies(pools, device), info.tiers, stores, group_bytes(info.kv), free)


class PinnedMemory:
    """Makes page-locked slabs on any thread; freed by `close`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._threads = threading.local()
        self._buffers: list[PinnedBuffer] = []

    def __call__(self, nbytes: int) -> Bytes:
        """[nbytes] uint8, aligned to pages. Raises CudaError."""
        if not getattr(self._threads, "current", False):
            self._device.make_current()
            self._threads.current = True
        buffer = PinnedBuffer(nbytes, "KV tier")
        self._buffers.append(buffer)
        return buffer.bytes

    def close(self) -> None:
        """What was made must no longer be used."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []
