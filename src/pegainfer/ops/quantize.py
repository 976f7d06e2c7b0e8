"""Quantisers from float32 to storage formats, for tests, benches and seeded models.

The plain ones and those of 32 round as ggml's reference quantisers do. Superblocks allow many encodings of
the same values; ours takes each group's range, without ggml's search for the least error.
runtime.weights.dequant reads what they write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.quantize_table import ENCODERS as TABLE_ENCODERS
from pegainfer.runtime.weights.weight import Weight, in_memory

Array = np.ndarray[Any, Any]
BLOCK = 32
SUPER = 256  # elements of a superblock


def quantize(format_name: str, values: Array) -> Array:
    """Bytes of `values` in GGUF's block format, row by row: [nbytes] uint8.

    Args:
        values: float32, finite; the last axis a multiple of the format's block.

    Raises UnsupportedError for a format that has no quantiser here.
    """
    encode = _ENCODERS.get(format_name)
    if encode is None:
        raise UnsupportedError("no quantiser for this format", expected=" ".join(_ENCODERS), got=format_name)
    with np.errstate(over="ignore", under="ignore"):
        raw: Array = np.ascontiguousarray(encode(np.ascontiguousarray(values, np.float32)))
    return raw.view(np.uint8).reshape(-1)


def quantized_weight(format_name: str, values: Array) -> Weight:
    """The same as a weight."""
    return in_memory(format_name, values.shape, quantize(format_name, values))


def _bf16(values: Array) -> Array:
    """To nearest even. Finite values only: a NaN's payload could round to infinity."""
    bits = values.view(np.uint32)
    return (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(
        "<u2"
    )


def _inverse(scale: Array) -> Array:
    """1 / scale in float32, 0 where there is no scale."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _half(scale: Array) -> Array:
    """[n, 1] float32 as [n, 2] bytes of float16."""
    return np.ascontiguousarray(scale.astype("<f2")).view(np.uint8)


def _nibbles(q: Array) -> Array:
    """[n, 32] values 0 … 15 as [n, 16] bytes: element i low, element 16 + i high."""
    low, high = np.split(q.astype(np.uint8), 2, axis=1)
    packed: Array = low | high << 4
    return packed


def _q8_0(values: Array) -> Array:
    """d = max|x| / 127; q = x / d to nearest, halves away from zero."""
    x = values.reshape(-1, BLOCK)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    q = whole + np.trunc(2 * (scaled - whole))
    return np.concatenate([_half(d), q.astype(np.int8).view(np.uint8)], axis=1)


def _q4_0(values: Array) -> Array:
    """d = (x of largest |x|) / -8, so that it is met exactly; q = x / d + 8, in 0 … 15."""
    x = values.reshape(-1, BLOCK)
    d = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) / np.float32(-8)
    q = np.minimum(np.trunc(x * _inverse(d) + np.float32(8.5)), 15)
    return np.concatenate([_half(d), _nibbles(q)], axis=1)


def _q4_1(values: Array) -> Array:
    """m = least x, d = (greatest - least) / 15; q = (x - m) / d, in 0 … 15."""
    x = values.reshape(-1, BLOCK)
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / np.float32(15)
    q = np.minimum(np.trunc((x - least) * _inverse(d) + np.float32(0.5)), 15)
    return np.concatenate([_half(d), _half(least), _nibbles(q)], axis=1)


def _fifth(q: Array) -> Array:
    """[n, 32] values 0 … 31 as [n, 4] bytes: bit i is the fifth bit of element i."""
    packed: Array = np.packbits(q.astype(np.uint8) >> 4, axis=1, bitorder="little")
    return packed


def _q5_0(values: Array) -> Array:
    """As Q4_0 with d = (x of largest |x|) / -16 and q = x / d + 16, in 0 … 31."""
    x = values.reshape(-1, BLOCK)
    d = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) / np.float32(-16)
    q = np.minimum(np.trunc(x * _inverse(d) + np.float32(16.5)), 31)
    return np.concatenate([_half(d), _fifth(q), _nibbles(q % 16)], axis=1)


def _q5_1(values: Array) -> Array:
    """As Q4_1 with 31 steps."""
    x = values.reshape(-1, BLOCK)
    least = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - least) / np.float32(31)
    q = np.trunc((x - least) * _inverse(d) + np.float32(0.5))
    return np.concatenate([_half(d), _half(least), _fifth(q), _nibbles(q % 16)], axis=1)


def _levels(values: Array, step: Array, least: int, greatest: int) -> Array:
    """values / step to the nearest whole number within bounds; 0 (or the nearest bound) where step is 0."""
    levels: Array = np.clip(np.rint(values * _inverse(step)), least, greatest)
    return levels


def _q4_k(values: Array) -> Array:
    """Groups of 32 between min(x, 0) and max(x) in 15 steps."""
    header, q = _grouped(values, 15)
    return np.concatenate([header, _group_nibbles(q)], axis=1)


def _q5_k(values: Array) -> Array:
    """The same in 31 steps; bit g of fifth byte i belongs to element i of group g."""
    header, q = _grouped(values, 31)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = np.bitwise_or.reduce(q >> 4 << shifts, axis=1)
    return np.concatenate([header, fifth, _group_nibbles(q & 15)], axis=1)


def _grouped(values: Array, steps: int) -> tuple[Array, Array]:
    """Headers [n, 16] and levels [n, 8, 32] uint8; steps and minima are 6-bit shares of d and dmin."""
    x = values.reshape(-1, SUPER // BLOCK, BLOCK)
    depth = -np.minimum(x.min(axis=2), 0)
    step = np.maximum(x.max(axis=2) + depth, 0) / np.float32(steps)
    d, dmin = ((v.max(axis=1, keepdims=True) / np.float32(63)).astype("<f2") for v in (step, depth))
    wide, low = d.astype(np.float32), dmin.astype(np.float32)
    scale, minimum = _levels(step, wide, 0, 63), _levels(depth, low, 0, 63)
    q = _levels(x + (low * minimum)[:, :, None], (wide * scale)[:, :, None], 0, steps).astype(np.uint8)
    sc, mn = scale.astype(np.uint8), minimum.astype(np.uint8)
    packed = [
        sc[:, :4] | sc[:, 4:] >> 4 << 6,
        mn[:, :4] | mn[:, 4:] >> 4 << 6,
        sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4,
    ]
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *packed], axis=1), q


def _group_nibbles(q: Array) -> Array:
    """[n, 8, 32] values 0 … 15 as [n, 128] bytes: even groups low, odd ones high."""
    packed: Array = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), -1)
    return packed


def _q6_k(values: Array) -> Array:
    """Groups of 16: the x of largest |x| is -32 steps; steps are int8 shares of d."""
    x = values.reshape(-1, SUPER // 16, 16)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
    step = peak / np.float32(-32)
    d = (np.abs(step).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
    wide = d.astype(np.float32)
    scale = _levels(step, wide, -127, 127)
    q = (_levels(x, (wide * scale)[:, :, None], -32, 31) + 32).astype(np.uint8)
    rows = q.reshape(len(q), 2, 4, BLOCK)  # a half's four rows share 64 bytes of nibbles and 32 of pairs
    low = (rows[:, :, :2] & 15 | rows[:, :, 2:] << 4).reshape(len(q), -1)
    pairs = rows >> 4 << np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce(pairs, axis=2).reshape(len(q), -1)
    return np.concatenate([low, high, scale.astype(np.int8).view(np.uint8), d.view(np.uint8)], axis=1)


_ENCODERS: dict[str, Callable[[Array], Array]] = {
    "f32": lambda values: values.astype("<f4"),
    "f16": lambda values: values.astype("<f2"),
    "bf16": _bf16,
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    **TABLE_ENCODERS,
}
