"""Weights in the layout that the kernels stream (csrc/formats.h)."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cpu.library import library
from pegainfer.ops.tensor import FORMATS
from pegainfer.runtime.weights.raw import RawWeight

Array = np.ndarray[Any, Any]

FORMAT_CODES = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3, "q4_1": 4, "q4_0": 5, "q4_k": 6, "q6_k": 7}


class PackedWeight:
    """A matrix [N, K] in tiles of 16 rows, within memory that it keeps alive.

    Args:
        raw: as a file holds it; only read here.
        memory: [packed_bytes] uint8, 64-byte aligned, to be filled.
        threads: that share the work.

    Raises UnsupportedError for a format that has no kernels, OpError where the bytes do not fit the shape.
    """

    def __init__(self, raw: RawWeight, memory: Array, threads: int = 1) -> None:
        need = packed_bytes(raw.format, raw.shape)
        data, order = _checked(raw)
        if memory.nbytes != need or memory.ctypes.data % 64:
            raise OpError("memory of a packed weight", expected=f"{need} bytes, aligned", got=memory.nbytes)
        n, k = raw.shape
        self.format = raw.format
        self.shape: tuple[int, int] = (n, k)
        self.nbytes = need
        self._memory = memory
        self.handle: int = library().pega_pack(
            FORMAT_CODES[raw.format], n, k, data.ctypes.data,
            None if order is None else order.ctypes.data, memory.ctypes.data, threads,
        )  # fmt: skip
        weakref.finalize(self, library().pega_packed_free, self.handle)

    def unpack(self, first: int = 0, count: int | None = None) -> Array:
        """Rows first … first + count as float32 [count, K]."""
        count = self.shape[0] - first if count is None else count
        if first < 0 or count < 0 or first + count > self.shape[0]:
            raise OpError("rows of a packed weight", expected=f"within {self.shape[0]}", got=(first, count))
        out = np.empty((count, self.shape[1]), np.float32)
        library().pega_unpack(self.handle, first, count, out.ctypes.data)
        return out


def packed_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    """Memory that a weight takes, a multiple of 64. Raises UnsupportedError, OpError."""
    if format_name not in FORMAT_CODES:
        raise UnsupportedError(
            "no CPU kernels for this weight format", expected=" ".join(FORMAT_CODES), got=format_name
        )
    if len(shape) != 2 or min(shape) < 1:
        raise OpError("a packed weight is a matrix", expected="[N, K]", got=shape)
    need: int = library().pega_packed_bytes(FORMAT_CODES[format_name], *shape)
    if not need:
        per_block = FORMATS[format_name][0]
        raise OpError("width of a packed weight", expected=f"a multiple of {per_block}", got=shape)
    return need


def reserve(nbytes: int) -> Array:
    """Zeroed memory for many weights, on huge pages where the system has them: [nbytes] uint8.

    A stream over small pages misses the TLB at every one of them.
    """
    region = mmap.mmap(-1, max(1, nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8, nbytes)


def _checked(raw: RawWeight) -> tuple[Array, Array | None]:
    """Bytes and row order, safe to hand to C. Raises OpError where they do not fit the shape."""
    n, k = raw.shape
    per_block, block_bytes = FORMATS[raw.format]
    data = np.ascontiguousarray(raw.data).reshape(-1)
    if data.nbytes != n * (k // per_block) * block_bytes:
        raise OpError(
            f"bytes of a {raw.format} weight {raw.shape}",
            expected=n * (k // per_block) * block_bytes,
            got=data.nbytes,
        )
    if raw.row_order is None:
        return data, None
    order = np.ascontiguousarray(raw.row_order, np.int64)
    if order.shape != (n,) or order.min() < 0 or order.max() >= n:
        raise OpError("row order of a packed weight", expected=f"{n} rows below {n}", got=order.shape)
    return data, order
