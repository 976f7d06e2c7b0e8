"""A CUDA driver without a GPU: memory is the host's, launches are noted and compute nothing.

Put in place of `cuda.bindings.driver`, it lets the code above the driver run to its end: addresses, copies,
packed arguments, graphs, errors.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pegainfer.kernels.build import find_sources
from pegainfer.kernels.manifest import Manifest, Unit, Variant
from pegainfer.lower.cuda.target import packaged_registers
from pegainfer.runtime.cuda import driver as door
from pegainfer.runtime.cuda.cublaslt import MatmulProblem

MAP_NORESERVE = 0x4000  # Linux's; Python names it from 3.13 on


class Code(int):
    """A CUresult."""

    name: str

    def __new__(cls, value: int, name: str) -> Code:
        code = super().__new__(cls, value)
        code.name = name
        return code


OK = Code(0, "CUDA_SUCCESS")
OUT_OF_MEMORY = Code(2, "CUDA_ERROR_OUT_OF_MEMORY")
NO_DEVICE = Code(100, "CUDA_ERROR_NO_DEVICE")
ILLEGAL_ADDRESS = Code(700, "CUDA_ERROR_ILLEGAL_ADDRESS")


class Names:
    """An enumeration: every attribute is its own name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Named(name)


class Named(int):
    """A member: an int to those who ask for one."""

    name: str

    def __new__(cls, name: str) -> Named:
        member = super().__new__(cls, abs(hash(name)) % 1000)
        member.name = name
        return member


class Fields:
    """A struct: any attribute can be set, nested ones too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Fields()
        object.__setattr__(self, name, value)
        return value


class Descriptor:
    """A TMA descriptor's 128 bytes: the matrix's address, then sizes, strides and box as they were given."""

    def __init__(self, matrix: int, *numbers: int) -> None:
        self._bytes = (ctypes.c_uint64 * 16)(matrix, *numbers)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


@dataclass(frozen=True)
class Launched:
    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    params: int  # address of the array of arguments
    pdl: bool
    captured: bool
    cooperative: bool
    cluster: int  # blocks along x; 0 for none


@dataclass
class FakeCuda:
    """What the driver would say of its GPU, and what it has been asked to do.

    Args:
        fail: function name -> result to give instead of doing it.
        broken: a kernel whose launches fail, by the beginning of its name.
        keep_freed: device memory that is freed is not used again, so that `was_freed` knows it.
    """

    capability: tuple[int, int] = (9, 0)
    num_sms: int = 132
    devices: int = 1
    version: int = 13000
    memory: int = 1 << 34
    l2: int = 50 << 20
    shared: int = 227 << 10  # bytes of shared memory that a block may have
    fail: dict[str, Code] = field(default_factory=dict)
    broken: str | None = None
    keep_freed: bool = False
    launches: list[Launched] = field(default_factory=list)
    graph_launches: int = 0
    used: int = 0
    pinned: int = 0  # bytes
    capturing: bool = False
    captured: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._held: dict[int, tuple[Any, int]] = {}
        self._freed: dict[int, tuple[Any, int]] = {}
        self._numbers = itertools.count(1)
        self._attributes = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": self.num_sms,
            "L2_CACHE_SIZE": self.l2,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.shared,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": self.shared + (1 << 10),
        }

    # Calls that do something

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return ((OK if self.devices else NO_DEVICE),)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return OK, self.version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, self.devices

    def cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, ...]:
        return OK, b"Fake GPU\0\0"

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return OK, ordinal

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"0000:%02X:00.0\0" % device

    def cuDeviceCanAccessPeer(self, device: int, other: int) -> tuple[Any, ...]:
        return OK, int((device // 2) == (other // 2))

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, ...]:
        return OK, self.memory

    def cuDeviceGetAttribute(self, attribute: Named, device: Any) -> tuple[Any, ...]:
        return OK, self._attributes[attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuGetErrorString(self, code: Any) -> tuple[Any, ...]:
        return OK, code.name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return OK, self.memory - self.used, self.memory

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        if self.used + nbytes > self.memory:
            return (OUT_OF_MEMORY, 0)
        # Anonymous pages are taken when they are first written: a model's weights cost nothing here.
        raw = mmap.mmap(-1, nbytes + 256, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        address = -(-ctypes.addressof(ctypes.c_uint8.from_buffer(raw)) // 256) * 256
        self._held[address] = (raw, nbytes)
        self.used += nbytes
        return OK, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        held = self._held.pop(address)
        self.used -= held[1]
        if self.keep_freed:
            self._freed[address] = held
        return (OK,)

    def was_freed(self, address: int) -> bool:
        """Whether that lies in device memory that is no longer anybody's; with `keep_freed`."""
        return any(start <= address < start + nbytes for start, (_, nbytes) in self._freed.items())

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        raw = (ctypes.c_uint8 * nbytes)()
        self._held[ctypes.addressof(raw)] = (raw, nbytes)
        self.pinned += nbytes
        return OK, ctypes.addressof(raw)

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        self.pinned -= self._held.pop(address)[1]
        return (OK,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return OK, address

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        handle = Fields()
        handle.reserved = address.to_bytes(8, "little")
        return OK, handle

    def cuIpcOpenMemHandle(self, handle: Fields, flags: int) -> tuple[Any, ...]:
        """The memory itself, which is of this process."""
        return OK, int.from_bytes(handle.reserved, "little")

    def cuMemcpyHtoDAsync(self, dst: int, src: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        ctypes.memmove(dst, src, nbytes)
        return (OK,)

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def cuMemsetD8Async(self, dst: int, byte: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        ctypes.memset(dst, byte, nbytes)
        return (OK,)

    def cuMemcpy2DAsync(self, spec: Any, stream: Any) -> tuple[Any, ...]:
        src = spec.srcHost if spec.srcMemoryType.name.endswith("HOST") else spec.srcDevice
        for row in range(spec.Height):
            ctypes.memmove(spec.dstDevice + row * spec.dstPitch, src + row * spec.srcPitch, spec.WidthInBytes)
        return (OK,)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        return OK, name.decode()

    def cuFuncGetAttribute(self, attribute: Named, function: str) -> tuple[Any, ...]:
        return OK, 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, f: str, threads: int, shared: int) -> Any:
        """By threads and shared memory, of which the system takes 1 KiB a block; registers are unknown."""
        return OK, max(1, min(2048 // threads, (self.shared + (1 << 10)) // (shared + (1 << 10))))

    def cuOccupancyMaxActiveClusters(self, f: str, config: Any) -> tuple[Any, ...]:
        """One block an SM, on the share of SMs that clusters can fill on an H100: 15 clusters of eight."""
        return OK, max(1, self.num_sms * 10 // 11 // max(1, config.gridDimX))

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> tuple[Any, ...]:
        if self.broken is not None and function.startswith(self.broken):
            return (ILLEGAL_ADDRESS,)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        pdl, cooperative = (
            any(what in a.id.name for a in config.attrs) for what in ("PROGRAMMATIC_STREAM", "COOPERATIVE")
        )
        clusters = [int(a.value.clusterDim.x) for a in config.attrs if "CLUSTER_DIMENSION" in a.id.name]
        block, shared = config.blockDimX, config.sharedMemBytes
        self.launches.append(
            Launched(function, grid, block, shared, params, pdl, self.capturing, cooperative, sum(clusters))
        )
        self.captured += self.capturing
        return (OK,)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        self.capturing, self.captured = True, 0
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        self.capturing = False
        return OK, ("graph", self.captured)

    def cuGraphGetNodes(self, graph: tuple[str, int]) -> tuple[Any, ...]:
        return OK, [], graph[1]

    def cuGraphLaunch(self, graph: Any, stream: Any) -> tuple[Any, ...]:
        self.graph_launches += 1
        return (OK,)

    def cuTensorMapEncodeTiled(
        self, kind: Any, rank: int, address: Any, sizes: Any, strides: Any, box: Any, *args: Any
    ) -> tuple[Any, ...]:
        return OK, Descriptor(int(address), *map(int, (*sizes, *strides, *box)))

    def cuEventElapsedTime(self, start: Any, stop: Any) -> tuple[Any, ...]:
        return OK, 1.0

    # Everything else

    def call(self, name: str) -> Any:
        """The function of that name: the one above, or one that returns a fresh handle."""

        def handle(*args: Any) -> tuple[Any, ...]:
            return OK, next(self._numbers)

        def nothing(*args: Any) -> tuple[Any, ...]:
            return (OK,)

        makes = ("Create", "Get", "Retain", "Load", "Instantiate")
        does = getattr(self, name, None) or (handle if any(m in name for m in makes) else nothing)

        def checked(*args: Any) -> Any:
            self.calls[name] += 1
            return (self.fail[name], 0) if name in self.fail else does(*args)

        return checked


class _Module(ModuleType):
    def __init__(self, fake: FakeCuda) -> None:
        super().__init__("cuda.bindings.driver")
        self._fake = fake

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("cu") and name[2:3].isupper():
            return self._fake.call(name)
        structs = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeValue", "CUDA_MEMCPY2D")
        if name in (*structs, "CUipcMemHandle"):
            return Fields
        if name.startswith("cuuint"):
            return int
        return Names()


@contextmanager
def fake_cuda(fake: FakeCuda | None = None) -> Iterator[FakeCuda]:
    """Replaces the driver inside the block."""
    fake = fake or FakeCuda()
    before = sys.modules.get("cuda.bindings.driver")
    sys.modules["cuda.bindings.driver"] = _Module(fake)
    door.bindings.cache_clear()
    try:
        yield fake
    finally:
        door.bindings.cache_clear()
        if before is None:
            del sys.modules["cuda.bindings.driver"]
        else:
            sys.modules["cuda.bindings.driver"] = before


def fake_kernels(folder: Path, arch: str = "90a") -> tuple[Path, ...]:
    """A folder of kernels as a build would leave it, of empty files: what a KernelLibrary asks for.

    Kernels that are known to be short of registers have theirs; 32 stands for all that are not.
    """
    registers = packaged_registers(arch)
    units = []
    (folder / arch).mkdir(parents=True)
    for source in find_sources():
        variants = tuple(Variant(n, f, registers.get(n, 32), 0, 0, 0) for n, f in source.variants.items())
        cubin = source.cubin("0" * 16)
        units.append(Unit(source.name, source.ops, cubin, f"hash of {source.name}", variants))
        (folder / arch / cubin).write_bytes(b"")
    Manifest(arch, "V13.0.0", tuple(units)).write(folder / arch)
    return (folder,)


class FakeLt:
    """cuBLASLt without the library: products are noted and compute nothing."""

    def __init__(self) -> None:
        self.products: list[MatmulProblem] = []

    def plan(self, problem: MatmulProblem) -> Any:
        return _FakePlan(self, problem)

    def close(self) -> None:
        return None


@dataclass
class _FakePlan:
    lt: FakeLt
    problem: MatmulProblem

    def run(self, x: int, w: int, out: int, stream: Any) -> None:
        self.lt.products.append(self.problem)

    def tune(self, *args: Any) -> None:
        return None

    def __str__(self) -> str:
        return f"{self.problem}: a library"
