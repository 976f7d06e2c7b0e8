"""One GPU and its primary context."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

from pegainfer.runtime.cuda.driver import CudaError, bindings, call

# Architectures that kernels are compiled for, by compute capability. 'a' units use features that no other
# generation has (wgmma, TMA multicast), so their cubins run on that capability alone.
ARCHS = {(8, 0): "80", (8, 6): "86", (8, 9): "89", (9, 0): "90a", (10, 0): "100a", (12, 0): "120a"}


CLUSTER = 8  # blocks of DeviceInfo.clusters: the most that every GPU with clusters allows


@dataclass(frozen=True)
class DeviceInfo:
    """What kernels and their choosers need to know of a GPU."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    num_sms: int
    l2_bytes: int
    max_shared: int  # bytes of shared memory that one block may opt in to
    shared_per_sm: int  # bytes; a block takes 1 KiB of it for the system besides its own
    total_memory: int  # bytes
    driver: int  # CUDA version that the driver speaks, 13000 is 13.0
    clusters: int = 0  # of CLUSTER blocks, one an SM, that run at once; 0 where that is not known yet

    @property
    def arch(self) -> str:
        """The architecture's name in `kernels build`. Raises CudaError for one that has no kernels."""
        arch = ARCHS.get(self.capability)
        if arch is None:
            raise CudaError(
                f"{self.name} has compute capability {self.capability[0]}.{self.capability[1]}",
                expected=" ".join(f"{a}.{b}" for a, b in ARCHS),
                remedy="use one of these GPUs, or the CPU backend",
            )
        return arch

    @property
    def clusters_exist(self) -> bool:
        """Whether blocks can form clusters."""
        return self.capability >= (9, 0)

    @property
    def pdl(self) -> bool:
        """Whether a kernel may start while the one before it ends (programmatic dependent launch)."""
        return self.capability >= (9, 0)


class Freed(Protocol):
    """Memory that a device owns."""

    def free(self) -> None: ...


_threads = threading.local()  # device: the one that the thread has made current


class Device:
    """Retains the primary context from `open` to `close`. One thread at a time makes it current."""

    def __init__(self, info: DeviceInfo, handle: Any, context: Any) -> None:
        self.info = info
        self.handle = handle
        self._context = context
        self._memory: WeakSet[Freed] = WeakSet()

    @classmethod
    def open(cls, ordinal: int = 0) -> Device:
        """Makes the GPU current on this thread. Raises CudaError where there is no such GPU."""
        driver = bindings()
        count = call("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise CudaError(
                f"no GPU with ordinal {ordinal}", expected=f"0 … {count - 1}" if count else "a visible GPU",
                remedy="check --device-ordinal and CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
        handle = call("cuDeviceGet", ordinal)
        names = driver.CUdevice_attribute

        def attribute(name: str) -> int:
            value = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(call("cuDeviceGetAttribute", value, handle, where=name))

        info = DeviceInfo(
            ordinal=ordinal,
            name=call("cuDeviceGetName", 128, handle).split(b"\0")[0].decode(),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            num_sms=attribute("MULTIPROCESSOR_COUNT"),
            l2_bytes=attribute("L2_CACHE_SIZE"),
            max_shared=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            total_memory=int(call("cuDeviceTotalMem", handle)),
            driver=int(call("cuDriverGetVersion")),
        )
        context = call("cuDevicePrimaryCtxRetain", handle, where=info.name)
        device = cls(info, handle, context)
        device.make_current()
        return device

    def make_current(self) -> None:
        """Must be called once on every thread that uses the device."""
        call("cuCtxSetCurrent", self._context, where=self.info.name)
        _threads.device = self

    def enter(self) -> None:
        """Makes it current on this thread, unless it is."""
        if getattr(_threads, "device", None) is not self:
            self.make_current()

    @staticmethod
    def owns(memory: Freed) -> None:
        """It is freed when the device closes that this thread has made current, if not before."""
        device: Device | None = getattr(_threads, "device", None)
        if device is not None:
            device._memory.add(memory)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, as the driver sees them now: other processes count."""
        free, total = call("cuMemGetInfo")
        return int(free), int(total)

    def synchronize(self, where: object = None) -> None:
        """Waits for all work. An error of an earlier kernel shows here; `where` names the step."""
        call("cuCtxSynchronize", where=where)

    def close(self) -> None:
        """Frees the memory that was taken while it was current, and releases the context; idempotent.

        Modules and streams end with the context, but not before the process if cuBLASLt was loaded: the
        runtime library under it holds the context as well, and with it all memory that nobody frees.
        """
        if self._context is None:
            return
        for memory in list(self._memory):
            memory.free()
        if getattr(_threads, "device", None) is self:
            _threads.device = None
        self._context = None
        call("cuDevicePrimaryCtxRelease", self.handle)
