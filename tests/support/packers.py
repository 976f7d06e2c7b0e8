"""Matrices as the writers of quantised checkpoints store them, packed by plain loops.

Each packer takes float32 [N, K] and gives the stored tensors by their suffixes, as (dtype, array), and the
float32 values that they mean. The loops follow the format descriptions; they share nothing with the readers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Packed(NamedTuple):
    tensors: dict[str, tuple[str, Array]]
    values: Array


class Integers(NamedTuple):
    """q [N, K], zero and scale [N, groups]: x = (q - zero) * scale."""

    q: Array
    zero: Array
    scale: Array


def integers(w: Array, bits: int, group: int, *, symmetric: bool, bf16: bool = False) -> Integers:
    """Levels without a sign; the scale is exact in float16 or bf16."""
    n, k = w.shape
    g, top = w.reshape(n, k // group, group), 2**bits - 1
    if symmetric:
        scale = 2 * np.abs(g).max(-1) / top
        zero = np.full(scale.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(g.min(-1), 0), np.maximum(g.max(-1), 0)
        scale = (high - low) / top
        zero = np.rint(-low / scale).astype(int)
    scale = narrow(scale, bf16)
    q = np.clip(np.rint(g / scale[..., None]) + zero[..., None], 0, top).astype(int)
    return Integers(q.reshape(n, k), zero, scale)


def narrow(a: Array, bf16: bool) -> Array:
    """Rounded to bf16 or float16, as float32."""
    if not bf16:
        return a.astype(np.float16).astype(np.float32)
    return (a.astype("<f4").view(np.uint32) + 0x8000 & 0xFFFF0000).astype("<u4").view(np.float32)


def stored(a: Array, bf16: bool) -> tuple[str, Array]:
    if bf16:
        return "BF16", (np.ascontiguousarray(a, "<f4").view(np.uint32) >> 16).astype("<u2")
    return "F16", a.astype("<f2")


def words(rows: Array, bits: int, order: tuple[int, ...] | None = None) -> tuple[str, Array]:
    """Each run of a row's numbers in a 32-bit word, the first lowest."""
    per = 32 // bits
    out = np.zeros((len(rows), rows.shape[1] // per), np.int64)
    for r, row in enumerate(rows.tolist()):
        for c in range(len(row) // per):
            for i in range(per):
                out[r, c] |= row[per * c + (order[i] if order else i)] << bits * i
    return "I32", out.astype(np.uint32).view(np.int32)


def _meaning(i: Integers, groups: Array) -> Array:
    return (i.q - i.zero[:, groups]).astype(np.float32) * i.scale[:, groups]


def awq(w: Array, group: int = 32) -> Packed:
    i = integers(w, 4, group, symmetric=False)
    tensors = {
        ".qweight": words(i.q.T, 4, AWQ_ORDER),
        ".qzeros": words(i.zero.T, 4, AWQ_ORDER),
        ".scales": stored(i.scale.T, bf16=False),
    }
    return Packed(tensors, _meaning(i, np.arange(w.shape[1]) // group))


def gptq(
    w: Array,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    v2: bool = False,
) -> Packed:
    k = w.shape[1]
    groups = np.arange(k) // group
    if act_order:
        groups = groups[np.random.default_rng(k).permutation(k)]
    order = np.argsort(groups, kind="stable")
    i = integers(np.ascontiguousarray(w[:, order]), bits, group, symmetric=symmetric)
    i = i._replace(q=i.q[:, np.argsort(order)])
    zeros = i.zero if v2 else (i.zero - 1) % 2**bits
    tensors = {
        ".qweight": ("I32", np.ascontiguousarray(words(i.q, bits)[1].T)),
        ".qzeros": words(zeros.T, bits),
        ".scales": stored(i.scale.T, bf16=False),
        ".g_idx": ("I32", groups.astype("<i4")),
    }
    return Packed(tensors, _meaning(i, groups))


def ct_packed(
    w: Array, bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: bool = False
) -> Packed:
    n, k = w.shape
    groups = np.arange(k) // group
    if act_order:
        groups = groups[np.random.default_rng(k).permutation(k)]
    order = np.argsort(groups, kind="stable")
    i = integers(np.ascontiguousarray(w[:, order]), bits, group, symmetric=symmetric, bf16=True)
    i = i._replace(q=i.q[:, np.argsort(order)])
    tensors = {
        ".weight_packed": words(i.q, bits),
        ".weight_scale": stored(i.scale, bf16=True),
        ".weight_shape": ("I64", np.array([n, k])),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = ("I32", np.ascontiguousarray(words(i.zero.T, bits)[1].T))
    if act_order:
        tensors[".weight_g_idx"] = ("I32", groups.astype("<i4"))
    return Packed(tensors, _meaning(i, groups))


def ct_int8(w: Array, *, symmetric: bool = True) -> Packed:
    """A scale for each row."""
    k = w.shape[1]
    i = integers(w, 8, k, symmetric=symmetric, bf16=True)
    tensors = {
        ".weight": ("I8", (i.q - 128).astype(np.int8)),
        ".weight_scale": stored(i.scale, bf16=True),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = ("I8", (i.zero - 128).astype(np.int8))
    return Packed(tensors, _meaning(i, np.zeros(k, int)))


def ct_fp4(w: Array, group: int) -> Packed:
    """NVFP4 (groups of 16: E4M3 scales, here powers of two, over a divisor) or MXFP4 (32)."""
    n, k = w.shape
    g = w.reshape(n, k // group, group)
    exponent = np.ceil(np.log2(np.abs(g).max(-1) / 6)).astype(int)
    divisor = np.float32(3.7) if group == 16 else np.float32(1)
    if group == 16:
        exponent = np.clip(exponent + 2, -6, 8)
    scale = np.exp2(exponent).astype(np.float32) / divisor
    magnitude = np.abs(g / scale[..., None])
    code = np.abs(magnitude[..., None] - E2M1).argmin(-1)
    values = np.sign(g) * E2M1[code] * scale[..., None]
    code = (code + 8 * (g < 0)).reshape(n, k)
    tensors = {".weight_packed": ("U8", (code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8))}
    if group == 16:
        tensors[".weight_scale"] = ("F8_E4M3", (exponent + 7 << 3).astype(np.uint8))
        tensors[".weight_global_scale"] = ("F32", np.array([divisor]))
    else:
        tensors[".weight_scale"] = ("U8", (exponent + 127).astype(np.uint8))
    return Packed(tensors, values.reshape(n, k).astype(np.float32))


def e4m3_value(code: int) -> float:
    """Of a code below 127, as OCP's table has it: exponent bias 7, subnormals of 2^-9."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_POSITIVE = np.array([e4m3_value(code) for code in range(127)], np.float32)


def e4m3_codes(x: Array) -> Array:
    """The nearest code; between two, the even one."""
    middle = (E4M3_POSITIVE[1:].astype(np.float64) + E4M3_POSITIVE[:-1]) / 2
    magnitude = np.abs(x).astype(np.float64)
    code = np.searchsorted(middle, magnitude)
    tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def fp8(w: Array, rows: int, columns: int, suffix: str = ".weight_scale", *, bf16: bool = False) -> Packed:
    """Tiles of rows x columns; the last ones may be smaller."""
    n, k = w.shape
    scale = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    codes, values = np.zeros((n, k), np.uint8), np.zeros((n, k), np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            s = np.float32(np.abs(w[tile]).max()) / np.float32(448)
            scale[i, j] = s = narrow(np.array([s]), bf16=True)[0] if bf16 else s
            codes[tile] = e4m3_codes(w[tile] / s)
            decoded = np.where(codes[tile] < 128, 1, -1) * E4M3_POSITIVE[codes[tile] & 127]
            values[tile] = decoded.astype(np.float32) * s
    if scale.size == 1:
        scale = scale.reshape(())
    tensors = {
        ".weight": ("F8_E4M3", codes),
        suffix: stored(scale, bf16=True) if bf16 else ("F32", scale),
        ".input_scale": ("F32", np.ones((), np.float32)),
    }
    return Packed(tensors, values)


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


class Kind(NamedTuple):
    """A way to store a checkpoint: its quantization_config, its packer, and the internal form it becomes."""

    config: dict[str, Any]
    pack: Callable[[Array], Packed]
    form: str


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_GROUPS = {"strategy": "group", "group_size": 32}
KINDS = {
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
                awq, "int4_g32"),
    "gptq": Kind(_GPTQ, gptq, "int4_g32"),
    "gptq_asym": Kind({**_GPTQ, "sym": False}, lambda w: gptq(w, symmetric=False), "int4_g32"),
    "gptq_v2": Kind({**_GPTQ, "checkpoint_format": "gptq_v2", "sym": False},
                    lambda w: gptq(w, symmetric=False, v2=True), "int4_g32"),
    "gptq_act_order": Kind({**_GPTQ, "desc_act": True, "sym": False},
                           lambda w: gptq(w, symmetric=False, act_order=True), "f16"),
    "gptq_8bit": Kind({**_GPTQ, "bits": 8}, lambda w: gptq(w, 8), "int8_g32"),
    "w4a16": Kind(_ct("pack-quantized", **_GROUPS), ct_packed, "int4_g32"),
    "w4a16_asym": Kind(_ct("pack-quantized", **_GROUPS, symmetric=False),
                       lambda w: ct_packed(w, symmetric=False), "int4_g32"),
    "w4a16_act_order": Kind(_ct("pack-quantized", **_GROUPS, actorder="group"),
                            lambda w: ct_packed(w, act_order=True), "f16"),
    "w8a16": Kind(_ct("pack-quantized", **_GROUPS, num_bits=8), lambda w: ct_packed(w, 8), "int8_g32"),
    "w8a8": Kind(_ct("int-quantized", num_bits=8, strategy="channel"), ct_int8, "int8"),
    "w8a8_asym": Kind(_ct("int-quantized", num_bits=8, strategy="channel", symmetric=False),
                      lambda w: ct_int8(w, symmetric=False), "int8"),
    "nvfp4": Kind(_ct("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
                  lambda w: ct_fp4(w, 16), "fp4_g16"),
    "mxfp4": Kind(_ct("mxfp4-pack-quantized", type="float", strategy="group", group_size=32),
                  lambda w: ct_fp4(w, 32), "fp4_g32"),
    "fp8_block": Kind({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [8, 32]},
                      lambda w: fp8(w, 8, 32, ".weight_scale_inv", bf16=True), "fp8_g32"),
    "fp8_tensor": Kind({"quant_method": "fp8", "activation_scheme": "static"},
                       lambda w: fp8(w, *w.shape), "fp8_r64"),
    "ct_fp8_row": Kind(_ct("float-quantized", type="float", num_bits=8, strategy="channel"),
                       lambda w: fp8(w, 1, w.shape[1], bf16=True), "fp8_r64"),
    "ct_fp8_block": Kind(_ct("float-quantized", type="float", num_bits=8, strategy="block",
                             block_structure=[8, 64]), lambda w: fp8(w, 8, 64), "fp8_g64"),
}  # fmt: skip
