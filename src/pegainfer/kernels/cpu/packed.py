"""Weights in the layout that the kernels stream (csrc/formats.h)."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cpu.library import library
from pegainfer.ops.tensor import FORMATS
from pegainfer.runtime.weights.raw import RawWeight

Array = np.ndarray[Any, Any]

FORMAT_CODES = {"f32": 0, "f16": 1, "bf16": 2, "q8_0": 3, "q4_1": 4, "q4_0": 5}


class PackedWeight:
    """A matrix [N, K] in tiles of 16 rows. Its memory is freed with the object."""

    def __init__(self, raw: RawWeight, threads: int = 1) -> None:
        """Copies the weight into tiles. Raises UnsupportedError for a format that has no kernels."""
        if raw.format not in FORMAT_CODES:
            raise UnsupportedError(
                "no CPU kernels for this weight format", expected=" ".join(FORMAT_CODES), got=raw.format
            )
        if len(raw.shape) != 2:
            raise OpError("a packed weight is a matrix", expected="[N, K]", got=raw.shape)
        data, order = _checked(raw)
        lib = library()
        n, k = raw.shape
        handle = lib.pega_pack(
            FORMAT_CODES[raw.format], n, k, data.ctypes.data,
            None if order is None else order.ctypes.data, threads,
        )  # fmt: skip
        if handle is None:
            raise UnsupportedError("no memory for a packed weight", got=f"{raw.shape} {raw.format}")
        self.format = raw.format
        self.shape: tuple[int, int] = (n, k)
        self.handle: int = handle
        self.nbytes: int = lib.pega_packed_bytes(handle)
        finalizer = weakref.finalize(self, lib.pega_packed_free, handle)
        finalizer.atexit = False  # a step may be reading it when the process ends

    def unpack(self, first: int = 0, count: int | None = None) -> Array:
        """Rows first … first + count as float32 [count, K]."""
        count = self.shape[0] - first if count is None else count
        if first < 0 or count < 0 or first + count > self.shape[0]:
            raise OpError("rows of a packed weight", expected=f"within {self.shape[0]}", got=(first, count))
        out = np.empty((count, self.shape[1]), np.float32)
        library().pega_unpack(self.handle, first, count, out.ctypes.data)
        return out


def _checked(raw: RawWeight) -> tuple[Array, Array | None]:
    """Bytes and row order, safe to hand to C. Raises OpError where they do not fit the shape."""
    n, k = raw.shape
    per_block, block_bytes = FORMATS[raw.format]
    if k % per_block:
        raise OpError("width of a packed weight", expected=f"a multiple of {per_block}", got=raw.shape)
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
    if order.shape != (n,) or (n and (order.min() < 0 or order.max() >= n)):
        raise OpError("row order of a packed weight", expected=f"{n} rows below {n}", got=order.shape)
    return data, order
