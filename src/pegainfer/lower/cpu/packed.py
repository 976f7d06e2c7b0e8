"""Weights in the layout that the kernels stream (csrc/formats.h)."""

from __future__ import annotations

import mmap
import weakref
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cpu.library import library
from pegainfer.ops.tensor import FORMATS
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]

FORMAT_CODES = {
    "f32": 0, "f16": 1, "bf16": 2, "q8_0": 3, "q4_1": 4, "q4_0": 5, "q4_k": 6, "q6_k": 7,
    "q5_0": 8, "q5_1": 9, "q5_k": 10, "iq4_nl": 11, "iq4_xs": 12, "q2_k": 13, "q3_k": 14,
    # Groups of 32, 64 and 128 columns differ in the next byte.
    "int4_g32": 15, "int4_g64": 15 + (1 << 8), "int4_g128": 15 + (2 << 8),
    "int8_g32": 16, "int8_g64": 16 + (1 << 8), "int8_g128": 16 + (2 << 8),
    "fp4_g16": 17, "fp4_g32": 18, "mxfp4": 19,
    "fp8_g32": 20, "fp8_g64": 20 + (1 << 8), "fp8_g128": 20 + (2 << 8),
    "fp8_r32": 20, "fp8_r64": 20 + (1 << 8), "fp8_r128": 20 + (2 << 8),
}  # fmt: skip


class PackedWeight:
    """A matrix [N, K] or a stack [E, N, K] in tiles of 16 rows, within memory that it keeps alive.

    Args:
        weight: as it is stored; only read here.
        memory: [packed_bytes] uint8, 64-byte aligned, to be filled.
        threads: that share the work.

    Raises UnsupportedError for a scheme that has no kernels, OpError for memory that does not fit.
    """

    def __init__(self, weight: Weight, memory: Array, threads: int = 1) -> None:
        weight = weight.in_form()
        scheme, need = weight.scheme.name, packed_bytes(weight.scheme.name, weight.shape)
        if memory.nbytes != need or memory.ctypes.data % 64:
            raise OpError("memory of a packed weight", expected=f"{need} bytes, aligned", got=memory.nbytes)
        self.format = scheme
        self.shape = weight.shape
        self.nbytes = need
        self._memory = memory
        rows = weight.parts[VALUES].addresses()
        self.handle: int = library().pega_pack(
            FORMAT_CODES[scheme], *as_stack(weight.shape), rows.ctypes.data, memory.ctypes.data, threads
        )
        weakref.finalize(self, library().pega_packed_free, self.handle)
        weight.parts[VALUES].forget()

    def unpack(self, first: int = 0, count: int | None = None) -> Array:
        """Rows first … first + count of all matrices as float32 [count, K]."""
        rows = prod(self.shape[:-1])
        count = rows - first if count is None else count
        if first < 0 or count < 0 or first + count > rows:
            raise OpError("rows of a packed weight", expected=f"within {rows}", got=(first, count))
        out = np.empty((count, self.shape[-1]), np.float32)
        library().pega_unpack(self.handle, first, count, out.ctypes.data)
        return out


def packed_bytes(format_name: str, shape: tuple[int, ...]) -> int:
    """Memory that a weight takes, a multiple of 64. Raises UnsupportedError, OpError."""
    if format_name not in FORMAT_CODES:
        raise UnsupportedError(
            "no CPU kernels for this weight format", expected=" ".join(FORMAT_CODES), got=format_name
        )
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise OpError("a packed weight is a matrix or a stack", expected="[N, K] or [E, N, K]", got=shape)
    need: int = library().pega_packed_bytes(FORMAT_CODES[format_name], *as_stack(shape))
    if not need:
        per_block = FORMATS[format_name][0]
        raise OpError("width of a packed weight", expected=f"a multiple of {per_block}", got=shape)
    return need


def as_stack(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape as that of a stack."""
    return shape if len(shape) == 3 else (1, *shape)


def reserve(nbytes: int) -> Array:
    """Zeroed memory for many weights, on huge pages where the system has them: [nbytes] uint8.

    A stream over small pages misses the TLB at every one of them.
    """
    region = mmap.mmap(-1, max(1, nbytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8, nbytes)
