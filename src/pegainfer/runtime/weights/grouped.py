"""The internal forms of quantised checkpoints: groups of 4-bit, 8-bit or FP4 levels with their scales.

All packings of 4-bit and 8-bit integers (AWQ, GPTQ, compressed-tensors) become one form each, and MXFP4 and
NVFP4 a third, so that kernels read three forms instead of every writer's. A form is a storage format like
those of GGUF: blocks along the inputs.

    int4_g32, _g64, _g128   a 32-bit word: a float32 scale whose low byte is the zero point; then g / 2 bytes
                            x = (q - zero) * scale, q in 0 … 15, zero in 0 … 255
    int8_g32, _g64, _g128   the same word, then g bytes; q in 0 … 255
    fp4_g32                 a float32 scale, then 16 bytes; x = E2M1[q] * scale
    fp4_g16                 two float32 scales, of sixteen elements each, then 16 bytes

Every 32 elements take 16 bytes of nibbles: low ones are elements 0 … 15, high ones 16 … 31. Scales of 16 bits
are exact in the word's upper 24; a scale of more digits is rounded to them, by 2^-17 of itself at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

F32 = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK = 32
GROUPS = (128, 64, 32)
# Values of the sixteen FP4 codes (OCP Microscaling Formats, version 1.0, E2M1). Kernels have one zero.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def group_size(group: int | None, columns: int) -> int | None:
    """The widest group of a form that divides a file's groups and rows; None where there is none.

    group: elements that share a scale; None: a whole row.
    """
    return next((g for g in GROUPS if columns % g == 0 and (group is None or group % g == 0)), None)


def pack_int(bits: int, group: int, levels: Bytes, scales: F32, zeros: Bytes) -> Bytes:
    """A matrix in the form int4 or int8: [N, bytes a row] uint8.

    Args:
        group: of the form.
        levels: [N, K] 0 … 2^bits - 1.
        scales, zeros: [N, K / group].
    """
    n, k = levels.shape
    groups = k // group
    words = np.ascontiguousarray(scales, "<f4").view("<u4")
    words = (words + np.uint32(0x80)) & np.uint32(0xFFFFFF00) | zeros
    out = np.empty((n, groups, 4 + group * bits // 8), np.uint8)
    out[:, :, :4] = words.astype("<u4").view(np.uint8).reshape(n, groups, 4)
    stored = _nibbles(levels) if bits == 4 else levels
    out[:, :, 4:] = stored.reshape(n, groups, -1)
    return out.reshape(n, -1)


def pack_fp4(group: int, codes: Bytes, scales: F32) -> Bytes:
    """A matrix in the form fp4: codes [N, K] 0 … 15, scales [N, K / group]."""
    n, k = codes.shape
    out = np.empty((n, k // BLOCK, 4 * (BLOCK // group) + 16), np.uint8)
    out[:, :, :-16] = np.ascontiguousarray(scales, "<f4").view(np.uint8).reshape(n, k // BLOCK, -1)
    out[:, :, -16:] = _nibbles(codes).reshape(n, k // BLOCK, 16)
    return out.reshape(n, -1)


def _nibbles(levels: Bytes) -> Bytes:
    """[N, K] values 0 … 15 as [N, K / 2] bytes."""
    halves = levels.reshape(-1, 2, BLOCK // 2)
    packed: Bytes = halves[:, 0] | halves[:, 1] << np.uint8(4)
    return packed.reshape(len(levels), -1)


# Decoders, as those of dequant.py. blocks: [n, bytes a block] uint8; out: [n, elements a block] float32.


def decode_int4(blocks: Bytes, out: F32) -> None:
    halves = out.reshape(len(blocks), -1, 2, BLOCK // 2)
    quants = blocks[:, 4:].reshape(len(blocks), -1, BLOCK // 2)
    halves[:, :, 0], halves[:, :, 1] = quants & 15, quants >> 4
    _scale(blocks, out)


def decode_int8(blocks: Bytes, out: F32) -> None:
    out[:] = blocks[:, 4:]
    _scale(blocks, out)


def _scale(blocks: Bytes, out: F32) -> None:
    word = np.ascontiguousarray(blocks[:, :4]).view("<u4")
    out -= word & np.uint32(0xFF)
    out *= (word & np.uint32(0xFFFFFF00)).view(np.float32)


def decode_fp4(blocks: Bytes, out: F32) -> None:
    """Either form: its block's bytes say how many scales there are."""
    out[:, :16], out[:, 16:] = E2M1[blocks[:, -16:] & 15], E2M1[blocks[:, -16:] >> 4]
    scales = np.ascontiguousarray(blocks[:, :-16]).view("<f4")
    by_scale = out.reshape(*scales.shape, -1)
    by_scale *= scales[:, :, None]
