"""Dequantisation to float32 with NumPy: how packers and oracles read any format of a weights file.

The order of float32 operations is that of the gguf package's reference, so results are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.runtime.weights.formats import FORMATS
from pegainfer.runtime.weights.fp8 import decode_fp8
from pegainfer.runtime.weights.grouped import E2M1, decode_fp4, decode_int4, decode_int8

F32 = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# Elements handled at a time, so that temporaries stay in cache and small beside the result.
SLAB_ELEMENTS = 1 << 18
# The sixteen levels of IQ4_NL and IQ4_XS, as ggml-common.h has them.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_TWICE_E2M1 = 2 * E2M1
_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)  # where four bit pairs stand in a byte


def dequantize(format_name: str, raw: Bytes, shape: tuple[int, ...]) -> F32:
    """The tensor's values, float32 of `shape`, freshly allocated.

    raw: [nbytes] uint8 in the named format. Raises UnsupportedError where the format has no decoder and
    ModelFileError where the number of bytes does not fit the shape.
    """
    decode = DECODERS.get(format_name)
    if decode is None:
        raise UnsupportedError(
            "no decoder for this tensor format", expected=" ".join(DECODERS), got=format_name,
            remedy="use a file in one of the formats named",
        )  # fmt: skip
    block = FORMATS[format_name]
    count = int(np.prod(shape, dtype=np.int64))
    if count % block.elements or raw.size != block.nbytes(count):
        raise ModelFileError(
            f"bytes do not fit the shape {shape} in {format_name}", expected=block.nbytes(count), got=raw.size
        )
    blocks = raw.reshape(-1, block.bytes)
    out = np.empty((count // block.elements, block.elements), np.float32)
    step = max(1, SLAB_ELEMENTS // block.elements)
    with np.errstate(all="ignore"):  # non-finite scales are the file's own values
        for i in range(0, len(blocks), step):
            decode(blocks[i : i + step], out[i : i + step])
    return out.reshape(shape)


# Decoders. blocks: [n, bytes a block] uint8; out: [n, elements a block] float32, written in place.


def _f32(blocks: Bytes, out: F32) -> None:
    out[:] = np.ascontiguousarray(blocks).view("<f4")


def _f16(blocks: Bytes, out: F32) -> None:
    out[:] = _half(blocks)


def _bf16(blocks: Bytes, out: F32) -> None:
    out[:] = (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes, out: F32) -> None:
    """d f16, then 16 bytes: low nibbles are elements 0..15, high ones 16..31; x = d * (q - 8)."""
    _quants(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks[:, 0:2])


def _q4_1(blocks: Bytes, out: F32) -> None:
    """d f16, m f16, then nibbles as in Q4_0; x = d * q + m."""
    _quants(blocks[:, 4:], out)
    out *= _half(blocks[:, 0:2])
    out += _half(blocks[:, 2:4])


def _q5_0(blocks: Bytes, out: F32) -> None:
    """d f16, 4 bytes of fifth bits (bit i of element i), then nibbles as in Q4_0; x = d * (q - 16)."""
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks[:, 0:2])


def _q5_1(blocks: Bytes, out: F32) -> None:
    """d f16, m f16, then fifth bits and nibbles as in Q5_0; x = d * q + m."""
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks[:, 0:2])
    out += _half(blocks[:, 2:4])


def _q8_0(blocks: Bytes, out: F32) -> None:
    """d f16, then 32 int8; x = d * q."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks[:, 0:2])


def _q4_k(blocks: Bytes, out: F32) -> None:
    """d f16, dmin f16, 12 bytes of 6-bit scales and minima for 8 groups of 32, then 128 bytes of nibbles.

    Bytes 32p..32p+31 of the nibbles hold group 2p (low) and 2p+1 (high); x = (d * sc) * q - dmin * m.
    """
    n = len(blocks)
    quants = blocks[:, 16:].reshape(n, 4, 1, 32)
    groups = out.reshape(n, 4, 2, 32)
    groups[:, :, :1] = quants & 15
    groups[:, :, 1:] = quants >> 4
    _scale_groups(blocks, out)


def _q5_k(blocks: Bytes, out: F32) -> None:
    """As Q4_K with 32 bytes of fifth bits between scales and nibbles: bit g of byte i is group g's i-th."""
    n = len(blocks)
    quants = blocks[:, 48:].reshape(n, 4, 1, 32)
    levels = np.concatenate([quants & 15, quants >> 4], axis=2).reshape(n, 8, 32)
    fifth = blocks[:, 16:48].reshape(n, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    out[:] = (levels | fifth << 4).reshape(n, 256)
    _scale_groups(blocks, out)


def _scale_groups(blocks: Bytes, out: F32) -> None:
    """What Q4_K and Q5_K have in common: their header's scales and minima on the levels in `out`."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1).astype(np.float32)
    minimum = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1).astype(np.float32)
    scale *= _half(blocks[:, 0:2])
    minimum *= _half(blocks[:, 2:4])
    by_group = out.reshape(len(blocks), 8, 32)
    by_group *= scale[:, :, None]
    by_group -= minimum[:, :, None]


def _q6_k(blocks: Bytes, out: F32) -> None:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d f16; x = (d * sc) * (q - 32).

    Each half of 128 elements takes 64 low bytes and 32 high bytes: its rows of 32 elements are the low
    nibbles of bytes 0..31 and 32..63, then their high nibbles; row r takes bits 2r, 2r+1 of the high bytes.
    """
    n = len(blocks)
    low = blocks[:, 0:128].reshape(n, 2, 2, 32)
    high = blocks[:, 128:192].reshape(n, 2, 1, 32)
    rows = np.concatenate([low & 15, low >> 4], axis=2)
    rows |= ((high >> _PAIRS) & 3) << 4
    scale = _half(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    out[:] = rows.reshape(n, 256)
    out -= 32
    by_scale = out.reshape(n, 16, 16)
    by_scale *= scale[:, :, None]


def _q2_k(blocks: Bytes, out: F32) -> None:
    """16 bytes of scales (low nibbles) and minima (high) for 16 groups of 16, 64 bytes of bit pairs, d f16,
    dmin f16; x = (d * sc) * q - dmin * m.

    Each half of 128 elements takes 32 bytes of pairs: its row r of 32 elements takes bits 2r, 2r + 1.
    """
    n = len(blocks)
    scale = (blocks[:, :16] & 15).astype(np.float32) * _half(blocks[:, 80:82])
    minimum = (blocks[:, :16] >> 4).astype(np.float32) * _half(blocks[:, 82:84])
    out[:] = (blocks[:, 16:80].reshape(n, 2, 1, 32) >> _PAIRS & 3).reshape(n, 256)
    by_group = out.reshape(n, 16, 16)
    by_group *= scale[:, :, None]
    by_group -= minimum[:, :, None]


def _q3_k(blocks: Bytes, out: F32) -> None:
    """32 bytes of high bits, 64 of bit pairs as in Q2_K, 12 of 6-bit scales for 16 groups, d f16;
    x = (d * (sc - 32)) * q, q = pair - (high bit is clear ? 4 : 0).

    Bit b of high byte i is element i of row b of 32 elements. Scales: their low nibbles in 8 bytes (low ones
    are groups 0 … 7), their high pairs in 4 (byte i has those of groups i, 4 + i, 8 + i, 12 + i).
    """
    n = len(blocks)
    low, high = blocks[:, 96:104], blocks[:, 104:108].reshape(n, 1, 4)
    nibbles = np.concatenate([low & 15, low >> 4], axis=1)
    scale = (nibbles | (high >> _PAIRS.reshape(1, 4, 1) & 3).reshape(n, 16) << 4).astype(np.float32) - 32
    scale *= _half(blocks[:, 108:110])
    out[:] = (blocks[:, 32:96].reshape(n, 2, 1, 32) >> _PAIRS & 3).reshape(n, 256)
    clear = ~blocks[:, :32].reshape(n, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1) & 1
    out -= clear.reshape(n, 256) * np.float32(4)
    by_group = out.reshape(n, 16, 16)
    by_group *= scale[:, :, None]


def _iq4_nl(blocks: Bytes, out: F32) -> None:
    """d f16, then nibbles as in Q4_0, which number the values of a table; x = d * IQ4[q]."""
    out[:, :16], out[:, 16:] = IQ4[blocks[:, 2:] & 15], IQ4[blocks[:, 2:] >> 4]
    out *= _half(blocks[:, 0:2])


def _iq4_xs(blocks: Bytes, out: F32) -> None:
    """d f16, 2 bytes and 4 bytes of the high pairs and low nibbles of 8 scales, then nibbles, 16 bytes for
    each group of 32; x = (d * (sc - 32)) * IQ4[q]."""
    n = len(blocks)
    pairs = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(n, 8)
    scale = (low | (pairs << 4).astype(np.uint8)).astype(np.float32) - 32
    scale *= _half(blocks[:, 0:2])
    quants, groups = blocks[:, 8:].reshape(n, 8, 16), out.reshape(n, 8, 32)
    groups[:, :, :16], groups[:, :, 16:] = IQ4[quants & 15], IQ4[quants >> 4]
    groups *= scale[:, :, None]


def _mxfp4(blocks: Bytes, out: F32) -> None:
    """The exponent e of a scale, then nibbles as in Q4_0; x = 2^(e - 127) * E2M1[q]."""
    out[:, :16], out[:, 16:] = _TWICE_E2M1[blocks[:, 1:] & 15], _TWICE_E2M1[blocks[:, 1:] >> 4]
    out *= half_of_e8m0(blocks[:, 0:1])


def half_of_e8m0(exponents: Bytes) -> F32:
    """2^(e - 128) as float32, subnormal for e below 2."""
    bits = exponents.astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(bits, 1)
    return np.where(bits < 2, small, (bits - 1) << np.uint32(23)).astype("<u4").view(np.float32)


def _half(columns: Bytes) -> F32:
    """[n, 2k] bytes of float16 as [n, k] float32."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _quants(quants: Bytes, out: F32) -> None:
    """[n, 16] bytes into [n, 32] values 0..15: low nibbles first."""
    out[:, :16], out[:, 16:] = quants & 15, quants >> 4


def _five_bits(fifth: Bytes, quants: Bytes, out: F32) -> None:
    """[n, 4] bytes of fifth bits and [n, 16] bytes of nibbles into [n, 32] values 0..31."""
    _quants(quants, out)
    out += np.unpackbits(fifth, axis=1, bitorder="little") << np.uint8(4)


DECODERS: dict[str, Callable[[Bytes, F32], None]] = {
    "f32": _f32,
    "f16": _f16,
    "bf16": _bf16,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    **dict.fromkeys(("int4_g32", "int4_g64", "int4_g128"), decode_int4),
    **dict.fromkeys(("int8_g32", "int8_g64", "int8_g128"), decode_int8),
    **dict.fromkeys(("fp4_g16", "fp4_g32"), decode_fp4),
    **dict.fromkeys(("fp8_g32", "fp8_g64", "fp8_g128", "fp8_r32", "fp8_r64", "fp8_r128"), decode_fp8),
}
