"""FP8 E4M3 values (OCP 8-bit Floating Point, revision 1.0), and the internal form of FP8 weights.

    fp8_g32, _g64, _g128   a float32 scale, then g bytes; x = E4M3[q] * scale
    fp8_r32, _r64, _r128   the same, and all groups of a row have equal scales

A scale of a whole row, of a tile or of a matrix is repeated for each group. The second name is a promise that
kernels may rely on: then they apply the scale once, to a row's sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.contract.errors import ModelFileError
from pegainfer.runtime.weights.grouped import group_size

F32 = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
LARGEST = np.float32(448)  # the greatest finite value


def _values() -> F32:
    """The value of each byte; both NaN codes are NaN."""
    sign, exponent, mantissa = (np.arange(256) >> s & m for s, m in ((7, 1), (3, 15), (0, 7)))
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[[127, 255]] = np.nan
    return ((1 - 2 * sign) * values).astype(np.float32)


E4M3 = _values()


def encode_e4m3(values: F32) -> Bytes:
    """The nearest E4M3 codes, halves to even; magnitudes above 448 become 448. Finite values only."""
    bits = np.minimum(np.abs(values), LARGEST).astype("<f4").view("<u4")
    normal = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1)) >> np.uint32(20)) - (
        120 << 3
    )
    small = np.rint(bits.view("<f4") * np.float32(2**9)).astype(np.uint32)  # below 2^-6: steps of 2^-9
    code = np.where(bits < np.uint32((127 - 6) << 23), small, normal).astype(np.uint8)
    signed: Bytes = code | np.signbit(values).astype(np.uint8) << np.uint8(7)
    return signed


def scale_for(peak: F32) -> F32:
    """The scale that makes the greatest magnitude 448."""
    scale: F32 = peak / LARGEST
    return scale


def quantize_groups(values: F32, group: int, *, whole_rows: bool = False) -> Bytes:
    """A matrix [N, K] in the form fp8 of this group: [N, bytes a row] uint8.

    whole_rows: one scale a row, which its groups repeat; else each group has its own.
    """
    n, k = values.shape
    x = values.reshape(n, k // group, group)
    peak = np.abs(x).max(-1)
    if whole_rows:
        peak = np.repeat(peak.max(-1, keepdims=True), k // group, -1)
    scales = scale_for(peak)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    inverse[np.isinf(inverse)] = 0  # of a scale below the normal numbers: such weights are 0
    return pack_fp8(group, encode_e4m3((x * inverse[..., None]).reshape(n, k)), scales)


def form_for(group: int | None, columns: int) -> str | None:
    """The name of the form for a file's groups (None: whole rows) and rows; None where there is none."""
    each = group_size(group, columns)
    return None if each is None else f"fp8_{'r' if group is None else 'g'}{each}"


def pack_fp8(group: int, codes: Bytes, scales: F32) -> Bytes:
    """A matrix in the form fp8: codes [N, K], scales [N, K / group].

    Raises ModelFileError for codes that mean NaN.
    """
    if np.any(codes & np.uint8(127) == 127):
        raise ModelFileError("an FP8 weight holds NaN", expected="finite values", remedy="convert it anew")
    n, k = codes.shape
    out = np.empty((n, k // group, 4 + group), np.uint8)
    out[:, :, :4] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(n, k // group, 4)
    out[:, :, 4:] = codes.reshape(n, k // group, group)
    return out.reshape(n, -1)


def decode_fp8(blocks: Bytes, out: F32) -> None:
    """As the decoders of dequant.py. blocks: [n, 4 + g] uint8; out: [n, g] float32."""
    out[:] = E4M3[blocks[:, 4:]]
    out *= np.ascontiguousarray(blocks[:, :4]).view("<f4")
