"""A typed view of device memory. It computes nothing: kernels know pointers, the host knows tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.runtime.bf16 import from_bf16, to_bf16
from pegainfer.runtime.cuda.memory import DeviceBuffer
from pegainfer.runtime.cuda.stream import Stream

Array = np.ndarray[Any, Any]

# Plain dtypes and how NumPy holds them; bf16 and FP8 travel as their bits.
NUMPY: dict[str, Any] = {
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i64": np.int64,
    "u64": np.uint64, "i32": np.int32, "u32": np.uint32, "u8": np.uint8, "f8_e4m3": np.uint8,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    return int(np.dtype(NUMPY[dtype]).itemsize)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class DeviceTensor:
    """Address, shape, strides (elements), dtype name; `owner` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    owner: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: str, what: str = "tensor") -> DeviceTensor:
        """Fresh memory, not initialised. Raises CudaError where memory is short."""
        buffer = DeviceBuffer(prod(shape) * item_bytes(dtype), f"{what} {list(shape)} {dtype}")
        return cls(buffer.address, shape, dtype, row_major(shape), buffer)

    @classmethod
    def at(cls, address: int, shape: tuple[int, ...], dtype: str, owner: Any = None) -> DeviceTensor:
        return cls(address, shape, dtype, row_major(shape), owner)

    @classmethod
    def from_numpy(cls, array: Array, dtype: str, stream: Stream, what: str = "tensor") -> DeviceTensor:
        """A copy on the device; float32 arrays become bf16 where asked. Waits for the copy."""
        host = encode(array, dtype)
        tensor = cls.empty(host.shape, dtype, what)
        stream.upload(tensor.address, host.ctypes.data, host.nbytes, what)
        stream.synchronize(what)
        return tensor

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * item_bytes(self.dtype)

    @property
    def contiguous(self) -> bool:
        return self.strides == row_major(self.shape)

    def numpy(self, stream: Stream) -> Array:
        """A copy on the host, bf16 as float32. Waits for the stream."""
        if not self.contiguous:
            raise OpError("only a contiguous tensor can be read", got=f"{self.shape}, strides {self.strides}")
        host = np.empty(self.shape, NUMPY[self.dtype])
        stream.download(host.ctypes.data, self.address, host.nbytes, self)
        stream.synchronize(self)
        return decode(host, self.dtype)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}] {self.dtype} @0x{self.address:x}"


def encode(array: Array, dtype: str) -> Array:
    """The array as the device holds it: C-contiguous, bf16 as bits rounded to nearest even."""
    if dtype == "bf16" and array.dtype != np.uint16:
        return to_bf16(np.ascontiguousarray(array, np.float32))
    return np.ascontiguousarray(array, NUMPY[dtype])


def decode(array: Array, dtype: str) -> Array:
    return from_bf16(array) if dtype == "bf16" else array
