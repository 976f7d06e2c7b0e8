"""A kernel launch whose arguments are packed once and launched many times."""

from __future__ import annotations

import ctypes
import functools
import struct as c_struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from pegainfer.contract.errors import OpError
from pegainfer.runtime.cuda.driver import bindings, call, fail
from pegainfer.runtime.cuda.layout import Layout, packing
from pegainfer.runtime.cuda.module import Kernel
from pegainfer.runtime.cuda.stream import Stream

_KINDS: dict[str, Any] = {
    "ptr": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}


class Arg(NamedTuple):
    """One kernel parameter: `kind` is ptr, i32, u32, i64, f32, or block (an object with an `address`, whose
    bytes the driver copies: a TensorMap, a struct).
    """

    kind: str
    value: Any


def ptr(value: int | None) -> Arg:
    """A device address; None is a null pointer."""
    return Arg("ptr", value or 0)


def i32(value: int) -> Arg:
    if not -(1 << 31) <= value < 1 << 31:
        raise OpError("kernel argument out of range", expected="32 bits, signed", got=value)
    return Arg("i32", value)


def i64(value: int) -> Arg:
    return Arg("i64", value)


def f32(value: float) -> Arg:
    return Arg("f32", value)


class Block:
    """Bytes of a struct parameter."""

    def __init__(self, data: bytes) -> None:
        self._raw = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        self.address = ctypes.addressof(self._raw)
        self.data = data


def struct(layout: Layout, **members: Any) -> Arg:
    """A struct passed by value. Raises OpError as Layout.values does."""
    return packed_struct(layout.kinds, layout.values(members))


def packed_struct(kinds: tuple[str, ...], values: Sequence[Any]) -> Arg:
    """The same from its members' kinds and values."""
    return Arg("block", Block(c_struct.pack(_packing(kinds), *values)))


_packing = functools.cache(packing)


def pack(args: Sequence[Arg]) -> tuple[Any, list[Any]]:
    """The driver's array of addresses, and the objects that hold the values (keep both alive)."""
    held: list[Any] = []
    addresses: list[int] = []
    for arg in args:
        if arg.kind == "block":
            held.append(arg.value)
            addresses.append(arg.value.address)
        else:
            cell = _KINDS[arg.kind](arg.value)
            held.append(cell)
            addresses.append(ctypes.addressof(cell))
    return (ctypes.c_void_p * len(addresses))(*addresses), held


class Launch:
    """Kernel, grid and arguments, ready to go: a call costs one driver call and no packing.

    Args:
        label: op and shapes, for errors and listings.
        pdl: the kernel may start before the one ahead of it has ended (it waits itself before it reads).
        cluster: blocks along x that share memory; 0 for none.
        cooperative: blocks wait for each other, so all must run at once; an error where they do not fit.
    """

    __slots__ = ("_array", "_call", "_config", "_held", "_params", "_stream", "block", "grid", "kernel",
                 "label", "shared")  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Arg],
        *,
        shared: int = 0,
        pdl: bool = False,
        cluster: int = 0,
        cooperative: bool = False,
        label: str = "",
    ) -> None:
        kernel.allow_shared(shared)
        self.kernel, self.grid, self.block, self.shared, self.label = kernel, grid, block, shared, label
        self._array, self._held = pack(args)
        self._params = ctypes.addressof(self._array)
        attributes = _attributes(bindings(), pdl, cluster, cooperative)
        self._config = _configuration(grid, block, shared, attributes)
        self._stream: Stream | None = None
        self._call = bindings().cuLaunchKernelEx

    def set(self, index: int, value: float) -> None:
        """Changes one argument in place, for launches to come (and captures to come, not past ones)."""
        self._held[index].value = value

    def __call__(self, stream: Stream) -> None:
        if stream is not self._stream:
            self._config.hStream = stream.handle
            self._stream = stream
        result = self._call(self._config, self.kernel.handle, self._params, 0)
        if result[0]:
            fail("cuLaunchKernelEx", result[0], self)

    def __str__(self) -> str:
        return f"{self.label}: {self.kernel.name} grid {self.grid} block {self.block} shared {self.shared}"


def _configuration(grid: tuple[int, int, int], block: int, shared: int, attributes: list[Any]) -> Any:
    """The driver's CUlaunchConfig, of no stream yet: grid in blocks, block in threads, shared in bytes."""
    config = bindings().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@functools.cache
def _attributes(d: ModuleType, pdl: bool, cluster: int, cooperative: bool = False) -> list[Any]:
    """Made once for each kind of launch: a configuration copies them."""
    out = []
    if pdl:
        value = d.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        out.append((d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    if cluster:
        value = d.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        out.append((d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if cooperative:
        value = d.CUlaunchAttributeValue()
        value.cooperative = 1
        out.append((d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    attributes = []
    for kind, value in out:
        attribute = d.CUlaunchAttribute()
        attribute.id, attribute.value = kind, value
        attributes.append(attribute)
    return attributes


def active_clusters(kernel: Kernel, cluster: int, block: int, shared: int) -> int:
    """How many clusters of `cluster` blocks the device holds at once."""
    kernel.allow_shared(shared)
    config = _configuration((cluster, 1, 1), block, shared, _attributes(bindings(), False, cluster))
    return int(call("cuOccupancyMaxActiveClusters", kernel.handle, config, where=kernel.name))
