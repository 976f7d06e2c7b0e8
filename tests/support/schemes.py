"""Storage schemes of several parts, as a line with quantised checkpoints would declare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.runtime.weights.part import Memory, Part
from pegainfer.runtime.weights.weight import Scheme, StoredPart, Weight

Array = np.ndarray[Any, Any]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word is column AWQ_ORDER[i]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3() -> Array:
    """The value of each byte; the two NaN codes as 0."""
    sign, exponent, mantissa = (np.arange(256) >> s & m for s, m in ((7, 1), (3, 15), (0, 7)))
    small = mantissa / 8 * 2.0**-6
    values = np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[[127, 255]] = 0
    return ((1 - 2 * sign) * values).astype(np.float32)


E4M3 = _e4m3()


def fp8_blocks(rows: int, columns: int) -> Scheme:
    """FP8 with one scale a tile of `rows` x `columns`."""

    def decode(w: Weight) -> Array:
        parts = w.arrays()
        scales = parts["scales"].repeat(rows, 0)[: w.shape[0]].repeat(columns, 1)[:, : w.shape[1]]
        return E4M3[parts["values"]] * scales

    values = StoredPart("values", ".weight", "N K", ("f8_e4m3",))
    scales = StoredPart("scales", ".weight_scale_inv", f"N/{rows} K/{columns}", ("f32", "bf16"))
    return Scheme(f"fp8_{rows}x{columns}", (values, scales), decode)


def _fp8_tensor(w: Weight) -> Array:
    parts = w.arrays()
    return E4M3[parts["values"]] * parts["scales"]


FP8_TENSOR = Scheme(
    "fp8_tensor",
    (
        StoredPart("values", ".weight", "N K", ("f8_e4m3",)),
        StoredPart("scales", ".weight_scale", "", ("f32",)),
    ),
    _fp8_tensor,
)


def _fp4(w: Weight) -> Array:
    parts = w.arrays()
    packed = parts["values"].view(np.uint8)
    values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(w.shape)]
    return values * np.exp2(parts["scales"].astype(np.float32) - 127).repeat(32, 1)


FP4 = Scheme(
    "fp4_32",
    (
        StoredPart("values", ".weight", "N K/2", ("i8",)),
        StoredPart("scales", ".scale", "N K/32", ("f8_e8m0",)),
    ),
    _fp4,
)


def awq(group: int) -> Scheme:
    """4-bit groups along the inputs, transposed, the eight columns of a word in AWQ's order."""

    def decode(w: Weight) -> Array:
        parts = w.arrays()
        at = np.argsort(AWQ_ORDER)
        q, zeros = (nibbles(parts[n])[..., at].reshape(len(parts[n]), -1) for n in ("values", "zeros"))
        scaled = (q - zeros.repeat(group, 0)) * parts["scales"].repeat(group, 0)
        return np.ascontiguousarray(scaled.T, np.float32)

    return Scheme(
        f"awq_{group}",
        (
            StoredPart("values", ".qweight", "K N/8", ("i32",)),
            StoredPart("zeros", ".qzeros", f"K/{group} N/8", ("i32",)),
            StoredPart("scales", ".scales", f"K/{group} N", ("f16",)),
        ),
        decode,
    )


def int4(group: int) -> Scheme:
    """compressed-tensors pack-quantized with zero points, which are packed along the outputs."""

    def decode(w: Weight) -> Array:
        parts = w.arrays()
        q = nibbles(parts["values"]).reshape(w.shape)
        zeros = nibbles(parts["zeros"]).swapaxes(1, 2).reshape(w.shape[0], -1)
        return ((q - zeros.repeat(group, 1)) * parts["scales"].repeat(group, 1)).astype(np.float32)

    return Scheme(
        f"int4_{group}",
        (
            StoredPart("values", ".weight_packed", "N K/8", ("i32",)),
            StoredPart("zeros", ".weight_zero_point", f"N/8 K/{group}", ("i32",)),
            StoredPart("scales", ".weight_scale", f"N K/{group}", ("bf16",)),
        ),
        decode,
    )


SCHEMES = (fp8_blocks(16, 32), FP8_TENSOR, FP4, awq(32), int4(32))


def nibbles(words: Array) -> Array:
    """[..., n] int32 as [..., n, 8] values 0 … 15, the lowest bits first."""
    return (words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, np.uint32) & 15).astype(np.int32)


def stored_parts(scheme: Scheme, shape: tuple[int, ...], seed: int) -> dict[str, tuple[str, Array]]:
    """(format, array) of each part, of random bits but for finite scales."""
    rng = np.random.default_rng(seed)
    found = {}
    for p in scheme.parts:
        form, stored = p.formats[0], p.shape(shape)
        if form in ("f32", "f16"):
            array: Array = rng.uniform(0.5, 2, stored).astype(f"<{form[0]}{int(form[1:]) // 8}")
        elif form == "bf16":
            array = rng.integers(0x3F00, 0x4000, stored).astype("<u2")  # 0.5 … 2
        elif form == "f8_e8m0":
            array = rng.integers(120, 135, stored).astype(np.uint8)
        elif form == "i32":
            array = rng.integers(-(2**31), 2**31, stored).astype("<i4")
        else:
            array = rng.integers(0, 256, stored).astype(np.uint8)
        found[p.name] = form, array
    return found


def weight_of(scheme: Scheme, shape: tuple[int, ...], parts: Mapping[str, tuple[str, Array]]) -> Weight:
    """A weight whose parts lie in memory."""
    held = {}
    for name, (form, array) in parts.items():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        held[name] = Part.at(form, array.shape, Memory(raw), 0)
    return Weight(scheme, shape, held)


def seeded(scheme: Scheme, shape: tuple[int, ...], seed: int) -> Weight:
    return weight_of(scheme, shape, stored_parts(scheme, shape, seed))
