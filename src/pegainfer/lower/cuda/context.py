"""One GPU ready for work: its kernels, its stream, its matrix library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from pegainfer.kernels.load import KernelLibrary
from pegainfer.lower.cuda.target import Target
from pegainfer.runtime.cuda.cublaslt import CublasLt
from pegainfer.runtime.cuda.device import CLUSTER, Device, DeviceInfo
from pegainfer.runtime.cuda.launch import active_clusters
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.peers import Peers
from pegainfer.runtime.cuda.stream import Stream
from pegainfer.runtime.cuda.tma import TensorMap
from pegainfer.runtime.rank_memory import RankMemory

ARRIVALS = 1 << 18  # counters of blocks that finish one output together; a launch uses its first few


class CudaContext:
    """What every program on a GPU shares. Its work runs in order on one stream."""

    def __init__(
        self, ordinal: int = 0, kernels: tuple[Path, ...] | None = None, group: RankMemory | None = None
    ) -> None:
        """
        Args:
            kernels: folders of cubins; None for the usual ones.
            group: memory of the group, where this is one of several ranks; closed with the context.

        Raises CudaError without a usable GPU, KernelsError without kernels for it.
        """
        self.device = Device.open(ordinal)
        self.library = KernelLibrary(self.device, kernels)
        at = (1, 0) if group is None else (group.ranks, group.rank)
        self.target = Target.of(self._with_clusters(self.device.info), self.library.manifest, *at)
        self.stream = Stream()
        self._closers: list[Callable[[], None]] = [self.device.close]
        self.peers: Peers | None = None  # the other ranks
        if group is not None:
            self.peers = Peers(group)
            self._closers += [group.close, self.peers.close]
        # Zero before a launch and after it: the last block to arrive sets its counter back.
        self.arrivals = DeviceBuffer(4 * ARRIVALS, "arrival counters")
        self.stream.fill(self.arrivals.address, 0, self.arrivals.nbytes)
        self._maps: dict[tuple[object, ...], TensorMap] = {}

    def tensor_map(
        self,
        address: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        box: tuple[int, ...],
        promotion: int,
    ) -> TensorMap:
        """A TMA descriptor, made once; see TensorMap.of."""
        key = (address, sizes, strides, dtype, box, promotion)
        if key not in self._maps:
            self._maps[key] = TensorMap.of(address, sizes, strides, dtype, box, promotion=promotion)
        return self._maps[key]

    def _with_clusters(self, info: DeviceInfo) -> DeviceInfo:
        """Queries the driver, because cards of one type lack different SMs."""
        if not info.clusters_exist:
            return info
        kernel = self.library.kernel("launch_nothing")
        return replace(info, clusters=active_clusters(kernel, CLUSTER, 32, info.max_shared))

    def run_alone(self, work: Callable[[], None]) -> None:
        """What `work` puts on the stream runs without the other ranks, so that none waits for it."""
        with contextlib.nullcontext() if self.peers is None else self.peers.alone(self.stream):
            work()

    def connect(self) -> None:
        """Returns when all ranks of the group have called it; from here on they sum over all of them."""
        if self.peers is not None:
            self.peers.connect(self.stream)

    def check(self) -> None:
        """Raises PeerFailedError where the group has failed, so that a step's results are not to be used."""
        if self.peers is not None:
            self.peers.check()

    @cached_property
    def lt(self) -> CublasLt:
        """Loaded at first use, because loading takes half a second and a decode-only test does not need
        it."""
        lt = CublasLt()
        self._closers.append(lt.close)
        return lt

    @cached_property
    def flush(self) -> DeviceBuffer:
        """Twice the L2 cache: writing it leaves nothing else there."""
        return DeviceBuffer(2 * self.device.info.l2_bytes, "cache flush")

    def describe(self) -> str:
        """One line for `doctor` and logs."""
        info = self.device.info
        total = info.total_memory / 2**30
        return f"cuda ({info.name}, sm_{info.arch}, {info.num_sms} SMs, {total:.0f} GiB)"

    def close(self) -> None:
        """Waits for the stream and releases everything; idempotent."""
        if self._closers:
            self.stream.synchronize("close")
        while self._closers:
            self._closers.pop()()
