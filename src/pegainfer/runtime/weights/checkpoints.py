"""Storage schemes of quantised checkpoints: AWQ, GPTQ and compressed-tensors.

Each scheme says how a matrix is stored and decodes it exactly. It also repacks a matrix into one of the
internal forms (grouped.py), which is what programs and kernels see. Sources: the packing functions of
AutoAWQ 0.2, AutoGPTQ 0.7, GPTQModel 2 and compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.runtime.weights.fp8 import E4M3
from pegainfer.runtime.weights.grouped import E2M1, F32, Bytes, group_size, pack_fp4, pack_int
from pegainfer.runtime.weights.weight import Scheme, StoredPart, Weight, in_memory

Array = np.ndarray[Any, Any]
WORDS = ("i32", "u32")
SCALES = ("f16", "bf16", "f32")
# Nibble i of an AWQ word is output AWQ_ORDER[i] of its eight.
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])


@dataclass(frozen=True)
class Levels:
    """An integer matrix as its scheme stores it: x = (levels - zeros) * scales.

    levels: [N, K] uint8. scales, zeros: [N, groups] float32 and uint8. group: columns of each, None: all.
    order: the group of each column, [K], where the columns are not in the order of their groups.
    """

    levels: Bytes
    scales: F32
    zeros: Bytes
    group: int | None
    order: Array | None = None

    def values(self) -> F32:
        """float32 [N, K]."""
        scales, zeros = self._of_columns()
        return (self.levels.astype(np.float32) - zeros) * scales

    def _of_columns(self) -> tuple[F32, Bytes]:
        if self.order is not None:
            if self.order.min() < 0 or self.order.max() >= self.scales.shape[1]:
                raise OpError(
                    "a column's group has no scale",
                    expected=f"groups 0 to {self.scales.shape[1] - 1}",
                    got=f"{self.order.min()} to {self.order.max()}",
                    remedy="a matrix in act order cannot be divided along its inputs: use one rank",
                )
            return self.scales[:, self.order], self.zeros[:, self.order]
        columns = self.levels.shape[1]
        each = self.group or columns
        return self.scales.repeat(each, 1)[:, :columns], self.zeros.repeat(each, 1)[:, :columns]

    def packed(self, bits: int, group: int) -> Bytes:
        """The matrix in the form int4 or int8 of this group, which divides the stored one: [N, bytes]."""
        columns = self.levels.shape[1]
        times = columns // self.scales.shape[1] // group
        return pack_int(bits, group, self.levels, self.scales.repeat(times, 1), self.zeros.repeat(times, 1))


def _integers(
    name: str, bits: int, group: int | None, parts: tuple[StoredPart, ...], read: Callable[[Weight], Levels],
    *, ordered: bool = False,
) -> Scheme:  # fmt: skip
    """A scheme of integers. ordered: columns are not in the order of their groups."""

    def form(columns: int) -> str:
        each = None if ordered else group_size(group, columns)
        return "f16" if each is None else f"int{bits}_g{each}"

    def repack(w: Weight) -> Weight:
        to, levels = form(w.shape[1]), read(w)
        if to == "f16":  # 2^-12 of a value at most; no form holds these groups
            return in_memory(to, w.shape, levels.values().astype("<f2").view(np.uint8))
        return in_memory(to, w.shape, levels.packed(bits, int(to.rpartition("g")[2])))

    return Scheme(name, parts, lambda w: read(w).values(), form, repack)


def _group_axis(group: int | None) -> str:
    return f"K/{group}" if group else ""


@cache
def awq(group: int | None) -> Scheme:
    """AWQ of the version 'gemm': transposed, eight outputs in a word in AWQ's order."""

    def read(w: Weight) -> Levels:
        a, n = w.arrays(), w.shape[0]
        levels, zeros = (
            unpack(a[part].reshape(-1, n // 8), 4)[..., np.argsort(AWQ_ORDER)].reshape(-1, n)
            for part in ("values", "zeros")
        )
        return Levels(_turned(levels), _turned(_scales(a, -1, n)), _turned(zeros), group)

    parts = (
        StoredPart("values", ".qweight", "K N/8", WORDS),
        StoredPart("zeros", ".qzeros", f"{_group_axis(group)} N/8", WORDS),
        StoredPart("scales", ".scales", f"{_group_axis(group)} N", SCALES),
    )
    return _integers(f"awq_{group or 'row'}", 4, group, parts, read)


@cache
def gptq(bits: int, group: int | None, *, act_order: bool, offset: int) -> Scheme:
    """GPTQ: words along the inputs, zero points along the outputs.

    Args:
        act_order: columns have the groups that g_idx says.
        offset: what is added to a stored zero point: 1 in the format of AutoGPTQ ("gptq"), 0 in "gptq_v2".
    """
    act_order = act_order and group is not None
    per, top = 32 // bits, 2**bits - 1

    def read(w: Weight) -> Levels:
        a, (n, k) = w.arrays(), w.shape
        levels = unpack(np.ascontiguousarray(a["values"].T), bits).reshape(n, k)
        zeros = unpack(a["zeros"].reshape(-1, n // per), bits).reshape(-1, n)
        zeros = _turned((zeros + np.uint8(offset)) & np.uint8(top))
        order = a["order"] if act_order else None
        return Levels(levels, _turned(_scales(a, -1, n)), zeros, group, order)

    parts = [
        StoredPart("values", ".qweight", f"K/{per} N", WORDS),
        StoredPart("zeros", ".qzeros", f"{_group_axis(group)} N/{per}", WORDS),
        StoredPart("scales", ".scales", f"{_group_axis(group)} N", SCALES),
    ]
    if act_order:
        parts.append(StoredPart("order", ".g_idx", "K", WORDS))
    name = f"gptq{bits}_{group or 'row'}_z{offset}{'_ordered' if act_order else ''}"
    return _integers(name, bits, group, tuple(parts), read, ordered=act_order)


@cache
def packed_ints(bits: int, group: int | None, *, symmetric: bool, act_order: bool) -> Scheme:
    """compressed-tensors 'pack-quantized': words along the inputs, zero points along the outputs.

    Levels are stored without a sign: the middle, 2^(bits - 1), is what a symmetric scheme calls 0.
    """
    per, middle = 32 // bits, 2 ** (bits - 1)

    def read(w: Weight) -> Levels:
        a, (n, k) = w.arrays(), w.shape
        levels, scales = unpack(a["values"], bits).reshape(n, k), _scales(a, n, -1)
        zeros: Bytes = np.full(scales.shape, middle, np.uint8)
        if not symmetric:
            packed = a["zeros"].reshape(-1, scales.shape[1])
            zeros = unpack(np.ascontiguousarray(packed.T), bits).reshape(scales.shape[1], n).T
        order = a["order"] if act_order else None
        return Levels(levels, scales, np.ascontiguousarray(zeros), group, order)

    parts = [
        StoredPart("values", ".weight_packed", f"N K/{per}", WORDS),
        StoredPart("scales", ".weight_scale", f"N {_group_axis(group)}", SCALES),
    ]
    if not symmetric:
        parts.append(StoredPart("zeros", ".weight_zero_point", f"N/{per} {_group_axis(group)}", WORDS))
    if act_order:
        parts.append(StoredPart("order", ".weight_g_idx", "K", WORDS))
    kind = ("_sym" if symmetric else "") + ("_ordered" if act_order else "")
    return _integers(
        f"ct_int{bits}_{group or 'row'}{kind}", bits, group, tuple(parts), read, ordered=act_order
    )


@cache
def plain_ints(group: int | None, *, symmetric: bool, per_tensor: bool = False) -> Scheme:
    """compressed-tensors 'int-quantized': int8 values, one scale a row, group or matrix."""

    def read(w: Weight) -> Levels:
        a, n = w.arrays(), w.shape[0]
        levels = a["values"].view(np.uint8) ^ np.uint8(0x80)
        scales = np.broadcast_to(_scales(a, 1 if per_tensor else n, -1), (n, _groups(w, group)))
        zeros = np.full(scales.shape, 128, np.uint8)
        if not symmetric:
            shift = a["zeros"].reshape(1 if per_tensor else n, -1).view(np.uint8) ^ np.uint8(0x80)
            zeros = np.ascontiguousarray(np.broadcast_to(shift, scales.shape))
        return Levels(levels, np.ascontiguousarray(scales), zeros, group)

    axes = "" if per_tensor else f"N {_group_axis(group)}"
    parts = [
        StoredPart("values", ".weight", "N K", ("i8",)),
        StoredPart("scales", ".weight_scale", axes, SCALES),
    ]
    if not symmetric:
        parts.append(StoredPart("zeros", ".weight_zero_point", axes, ("i8",)))
    kind = ("_sym" if symmetric else "") + ("_tensor" if per_tensor else "")
    return _integers(f"ct_i8_{group or 'row'}{kind}", 8, group, tuple(parts), read)


@cache
def fp4(kind: str) -> Scheme:
    """compressed-tensors FP4: 'nvfp4' has groups of 16 with E4M3 scales over a divisor of the whole matrix,
    'mxfp4' groups of 32 with powers of two. Element 2i is the low nibble of byte i."""
    group = 16 if kind == "nvfp4" else 32

    def read(w: Weight) -> tuple[Bytes, F32]:
        a = w.arrays()
        packed = a["values"].view(np.uint8)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(w.shape)
        if kind == "nvfp4":
            return codes, np.divide(E4M3[a["scales"]], a["divisor"].reshape(1, 1), dtype=np.float32)
        return codes, np.exp2(a["scales"].astype(np.float32) - 127)

    def decode(w: Weight) -> F32:
        codes, scales = read(w)
        return E2M1[codes] * scales.repeat(group, 1)

    def form(columns: int) -> str:
        return f"fp4_g{group}" if columns % 32 == 0 else "f16"

    def repack(w: Weight) -> Weight:
        if form(w.shape[1]) == "f16":
            return in_memory("f16", w.shape, decode(w).astype("<f2").view(np.uint8))
        return in_memory(form(w.shape[1]), w.shape, pack_fp4(group, *read(w)))

    parts = [
        StoredPart("values", ".weight_packed", "N K/2", ("u8",)),
        StoredPart(
            "scales", ".weight_scale", f"N K/{group}", ("f8_e4m3",) if group == 16 else ("u8", "f8_e8m0")
        ),
    ]
    if kind == "nvfp4":
        parts.append(StoredPart("divisor", ".weight_global_scale", "", ("f32",)))
    return Scheme(kind, tuple(parts), decode, form, repack)


def unpack(words: Array, bits: int) -> Bytes:
    """[..., n] 32-bit words as [..., n, 32 / bits] uint8, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return np.stack([octets & np.uint8(15), octets >> np.uint8(4)], -1).reshape(*words.shape, 8)


def _scales(arrays: dict[str, Array], *shape: int) -> F32:
    return arrays["scales"].astype(np.float32).reshape(shape)


def _groups(w: Weight, group: int | None) -> int:
    return -(-w.shape[1] // group) if group else 1


def _turned(a: Array) -> Array:
    return np.ascontiguousarray(a.T)
