"""Descriptors for the tensor memory accelerator (Hopper and later): 128 bytes, passed to kernels by value."""

from __future__ import annotations

import ctypes
from typing import Any

from pegainfer.contract.errors import OpError
from pegainfer.runtime.cuda.driver import bindings, call
from pegainfer.runtime.cuda.launch import Arg
from pegainfer.runtime.cuda.tensor import item_bytes

_TYPES = {
    "bf16": "BFLOAT16",
    "f16": "FLOAT16",
    "f32": "FLOAT32",
    "i32": "INT32",
    "u8": "UINT8",
    "f8_e4m3": "UINT8",
}
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


class TensorMap:
    """How the copy engine reads boxes of a row-major matrix [rows, columns] of pitch `pitch` elements."""

    def __init__(
        self,
        address: int,
        rows: int,
        columns: int,
        dtype: str,
        box: tuple[int, int],
        *,
        pitch: int | None = None,
        swizzle: int = 128,
        promotion: int = 128,
    ) -> None:
        """
        Args:
            box: (rows, columns) of one copy; its columns must fill the swizzle's bytes or less.
            swizzle: bytes, 0 for none.
            promotion: bytes that L2 fetches at a time: 64, 128 or 256.
        """
        pitch_bytes = (pitch or columns) * item_bytes(dtype)
        self._encode(address, (rows, columns), (pitch_bytes,), dtype, box, swizzle, promotion)

    @classmethod
    def of(
        cls,
        address: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        box: tuple[int, ...],
        *,
        swizzle: int = 128,
        promotion: int = 128,
    ) -> TensorMap:
        """Boxes of up to five axes, the outermost first; elements of the last axis lie together.

        Args:
            strides: bytes from one element to the next along each axis but the last; in any order of size.
        """
        self = cls.__new__(cls)
        self._encode(address, sizes, strides, dtype, box, swizzle, promotion)
        return self

    def _encode(
        self,
        address: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        box: tuple[int, ...],
        swizzle: int,
        promotion: int = 128,
    ) -> None:
        inner = box[-1] * item_bytes(dtype)
        uneven = inner % 16 or any(s % 16 for s in strides)
        if uneven or (swizzle and inner > swizzle) or max(box) > 256 or len(sizes) > 5:
            raise OpError(
                "memory does not fit a TMA descriptor",
                expected="strides and box width multiples of 16 bytes, width within the swizzle, sides ≤ 256",
                got=f"strides {strides} B, box {box} {dtype}, swizzle {swizzle} B",
            )
        d = bindings()
        u32, u64 = d.cuuint32_t, d.cuuint64_t
        self._map = call(
            "cuTensorMapEncodeTiled",
            getattr(d.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype]}"),
            len(sizes),
            address,
            [u64(n) for n in reversed(sizes)],
            [u64(n) for n in reversed(strides)],
            [u32(n) for n in reversed(box)],
            [u32(1) for _ in sizes],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(d.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
            getattr(d.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_L2_{promotion}B"),
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            where=f"{list(sizes)} {dtype}",
        )
        raw: Any = (ctypes.c_uint8 * 192)()
        self._raw = raw  # the driver wants the 128 bytes on a 64-byte boundary
        self.address = -(-ctypes.addressof(raw) // 64) * 64
        ctypes.memmove(self.address, int(self._map.getPtr()), 128)

    def arg(self) -> Arg:
        return Arg("block", self)
