"""Quantisers to formats whose levels number a table, to few bits, and to the internal groups of 4 and 8 bits.

Plain roundings without a search for the least error: these make weights for tests, benches and seeded models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.runtime.weights.dequant import IQ4
from pegainfer.runtime.weights.fp8 import quantize_groups
from pegainfer.runtime.weights.grouped import BLOCK, E2M1, pack_fp4, pack_int

Array = np.ndarray[Any, Any]
SUPER = 256


def _inverse(scale: Array) -> Array:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def nearest(table: Array, values: Array) -> Array:
    """The number of the table's entry next to each value, uint8."""
    order = np.argsort(table, kind="stable")
    bounds = (table[order][1:] + table[order][:-1]) / 2
    found: Array = order[np.searchsorted(bounds, values)].astype(np.uint8)
    return found


def _peak(x: Array) -> Array:
    """Of the last axis, the value of largest magnitude, kept as an axis of one entry."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _nibbles(q: Array) -> Array:
    """[..., 32] values 0 … 15 as [..., 16] bytes."""
    packed: Array = q[..., :16] | q[..., 16:] << np.uint8(4)
    return packed


def _int_groups(bits: int, group: int) -> Callable[[Array], Array]:
    """Between min(x, 0) and max(x, 0) in 2^bits - 1 steps, so that 0 is a level, the zero point."""
    top = 2**bits - 1

    def encode(values: Array) -> Array:
        x = values.reshape(-1, values.shape[-1] // group, group)
        low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
        scale = ((high - low) / np.float32(top)).astype("<f2").astype(np.float32)
        zero = np.clip(np.rint(-low * _inverse(scale)), 0, top)
        q = np.clip(np.rint(x * _inverse(scale)[..., None]) + zero[..., None], 0, top)
        levels = q.astype(np.uint8).reshape(-1, values.shape[-1])
        return pack_int(bits, group, levels, scale, zero.astype(np.uint8))

    return encode


def _fp8_groups(group: int, *, whole_rows: bool) -> Callable[[Array], Array]:
    return lambda values: quantize_groups(values.reshape(-1, values.shape[-1]), group, whole_rows=whole_rows)


def _fp4_groups(group: int) -> Callable[[Array], Array]:
    """The greatest magnitude is 6 steps."""

    def encode(values: Array) -> Array:
        x = values.reshape(-1, values.shape[-1] // group, group)
        scale = np.abs(x).max(-1) / np.float32(6)
        codes = nearest(E2M1, x * _inverse(scale)[..., None])
        return pack_fp4(group, codes.reshape(-1, values.shape[-1]), scale)

    return encode


def _mxfp4(values: Array) -> Array:
    """Scales are powers of two: the exponent of the greatest magnitude, less that of 4."""
    x = values.reshape(-1, BLOCK)
    peak = np.abs(x).max(-1, keepdims=True)
    exponent = np.clip(np.frexp(peak)[1] - 1 - 2 + 127, 0, 254)
    codes = nearest(E2M1, np.ldexp(x, 127 - exponent))
    return np.concatenate([exponent.astype(np.uint8), _nibbles(codes)], axis=1)


def _iq4_nl(values: Array) -> Array:
    """d = (x of largest |x|) / -127, the table's least entry."""
    x = values.reshape(-1, BLOCK)
    d = (_peak(x) / np.float32(-127)).astype("<f2")
    codes = nearest(IQ4, x * _inverse(d.astype(np.float32)))
    return np.concatenate([d.view(np.uint8), _nibbles(codes)], axis=1)


def _shares(step: Array, bound: int) -> tuple[Array, Array]:
    """f16 d [n, 1] and whole shares of it within ± bound, whose product is near `step` [n, groups]."""
    d = (np.abs(step).max(axis=1, keepdims=True) / np.float32(bound)).astype("<f2")
    return d, np.clip(np.rint(step * _inverse(d.astype(np.float32))), -bound, bound).astype(np.int64)


def _iq4_xs(values: Array) -> Array:
    """Groups of 32 as in IQ4_NL; their steps are 6-bit shares of d."""
    x = values.reshape(-1, SUPER // BLOCK, BLOCK)
    d, share = _shares(_peak(x)[..., 0] / np.float32(-127), 31)
    codes = nearest(IQ4, x * _inverse(d.astype(np.float32) * share.astype(np.float32))[..., None])
    stored = (share + 32).astype(np.uint16)
    high = np.bitwise_or.reduce((stored >> 4) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    low = (stored & 15).astype(np.uint8).reshape(-1, 4, 2)
    parts = [d, high.astype("<u2")[:, None], low[..., 0] | low[..., 1] << np.uint8(4), _nibbles(codes)]
    return np.concatenate([p.reshape(len(x), -1).view(np.uint8) for p in parts], axis=1)


def _pairs(q: Array) -> Array:
    """[n, 256] values 0 … 3 as [n, 64] bytes: four rows of 32 elements share 32 bytes."""
    rows = q.reshape(len(q), 2, 4, BLOCK) << np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    packed: Array = np.bitwise_or.reduce(rows, axis=2).reshape(len(q), -1)
    return packed


def _q2_k(values: Array) -> Array:
    """Groups of 16 between min(x, 0) and max(x) in 3 steps; steps and minima are 4-bit shares."""
    x = values.reshape(-1, SUPER // 16, 16)
    depth = -np.minimum(x.min(axis=2), 0)
    d, share = _shares(np.maximum(x.max(axis=2) + depth, 0) / np.float32(3), 15)
    dmin, minimum = _shares(depth, 15)
    step, low = (a.astype(np.float32) * b.astype(np.float32) for a, b in ((d, share), (dmin, minimum)))
    q = np.clip(np.rint((x + low[..., None]) * _inverse(step)[..., None]), 0, 3).astype(np.uint8)
    scales = (share | minimum << 4).astype(np.uint8)
    return np.concatenate(
        [scales, _pairs(q.reshape(len(x), SUPER)), d.view(np.uint8), dmin.view(np.uint8)], axis=1
    )


def _q3_k(values: Array) -> Array:
    """Groups of 16: the x of largest |x| is -4 steps; steps are 6-bit shares of d."""
    x = values.reshape(-1, SUPER // 16, 16)
    d, share = _shares(_peak(x)[..., 0] / np.float32(-4), 31)
    step = d.astype(np.float32) * share.astype(np.float32)
    q = (np.clip(np.rint(x * _inverse(step)[..., None]), -4, 3) + 4).astype(np.uint8).reshape(len(x), SUPER)
    rows = (q >> np.uint8(2)).reshape(-1, 8, BLOCK) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = np.bitwise_or.reduce(rows, axis=1)
    stored = (share + 32).astype(np.uint8)
    low = stored[:, :8] & 15 | (stored[:, 8:] & 15) << np.uint8(4)
    pairs = (stored >> np.uint8(4)).reshape(-1, 4, 4) << np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    parts = [high, _pairs(q & np.uint8(3)), low, np.bitwise_or.reduce(pairs, axis=1), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


ENCODERS: dict[str, Callable[[Array], Array]] = {
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "mxfp4": _mxfp4,
    **{f"int{bits}_g{group}": _int_groups(bits, group) for bits in (4, 8) for group in (32, 64, 128)},
    **{f"fp4_g{group}": _fp4_groups(group) for group in (16, 32)},
    **{f"fp8_g{group}": _fp8_groups(group, whole_rows=False) for group in (32, 64, 128)},
    **{f"fp8_r{group}": _fp8_groups(group, whole_rows=True) for group in (32, 64, 128)},
}
