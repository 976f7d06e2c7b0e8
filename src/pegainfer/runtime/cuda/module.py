"""Cubins loaded through the driver, and the kernels in them."""

from __future__ import annotations

from typing import Any

from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.driver import CudaError, bindings, call

STATIC_SHARED = 48 << 10  # bytes; a block that wants more must opt in


class Kernel:
    """One entry point. `shared` is what launches ask for at the most; it is opted in to here once."""

    def __init__(self, name: str, handle: Any, device: Device) -> None:
        self.name = name
        self.handle = handle
        self._device = device
        self._opted = STATIC_SHARED - self.attribute("SHARED_SIZE_BYTES")

    def attribute(self, name: str) -> int:
        """E.g. NUM_REGS, LOCAL_SIZE_BYTES, SHARED_SIZE_BYTES (static), MAX_THREADS_PER_BLOCK."""
        which = getattr(bindings().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(call("cuFuncGetAttribute", which, self.handle, where=f"{self.name} {name}"))

    def allow_shared(self, nbytes: int) -> None:
        """Raises the limit of dynamic shared memory. Raises CudaError if the device has less."""
        if nbytes <= self._opted:
            return
        if nbytes > self._device.info.max_shared:
            raise CudaError(
                f"kernel {self.name} needs more shared memory than a block of this GPU has",
                expected=f"at most {self._device.info.max_shared} bytes",
                got=f"{nbytes} bytes ({nbytes - self._device.info.max_shared} too many)",
                where=self._device.info.name,
            )
        which = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", self.handle, which, nbytes, where=f"{self.name}, {nbytes} bytes shared")
        self._opted = nbytes

    def blocks_per_sm(self, threads: int, shared: int) -> int:
        self.allow_shared(shared)
        return int(call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.handle, threads, shared))

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Module:
    """A cubin on the device."""

    def __init__(self, cubin: bytes, device: Device, where: object) -> None:
        """`where` names the file. Raises CudaError for a cubin of another architecture."""
        self._device = device
        self._where = where
        self._handle = call("cuModuleLoadData", cubin, where=where)
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """Raises CudaError where the cubin has no such entry point."""
        found = self._kernels.get(name)
        if found is None:
            handle = call("cuModuleGetFunction", self._handle, name.encode(), where=f"{self._where}: {name}")
            found = self._kernels[name] = Kernel(name, handle, self._device)
        return found
