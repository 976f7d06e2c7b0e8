"""Lowering of embedding, norms, RoPE, cache writes and activation."""

from __future__ import annotations

from pegainfer.lower.cuda.gemm import rms_norm, silu, take_rows
from pegainfer.lower.cuda.lowering import LoweringContext, Operands, blocks, handles
from pegainfer.lower.cuda.packed import form_of, take_packed_rows
from pegainfer.lower.cuda.plan import Packed, Place, ptr
from pegainfer.ops.float8 import E4M3
from pegainfer.runtime.cuda.launch import f32, i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

HEADS = (64, 128, 256)  # sizes that the fused kernels are compiled for


@handles("embedding")
def _embedding(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("out")
    form = form_of(c.call, ("table",))
    if form is not None:
        packed = Place(Packed((c.call.tensors["table"].storage,), form.name, "rows"))
        take_packed_rows(c, c.address("out"), packed, c.address("ids"), s["T"], s["V"], s["M"])
        return
    table = c.matrix("table", dtype=dtype)
    take_rows(c, table, c.address("ids"), s["T"], s["M"], dtype, c.address("out"), s["V"])


@handles("gather_rows")
def _gather_rows(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    if c.dtype("out") != dtype:
        raise c.refuse("dtype of out", dtype, c.dtype("out"))
    take_rows(c, c.address("x"), c.address("rows"), s["L"], s["M"], dtype, c.address("out"), s["T"])


@handles("rms_norm")
def _rms_norm(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    if c.dtype("out") != dtype:
        raise c.refuse("dtype of out", dtype, c.dtype("out"))
    weight = c.vector("weight")
    assert weight is not None
    rms_norm(c, c.address("out"), c.address("x"), weight, s["T"], s["M"], dtype, c.call.attrs["eps"])


@handles("head_norm")
def _head_norm(c: LoweringContext) -> None:
    s = c.sizes
    heads = s["T"] * s["H"]
    args = [
        ptr(c.address("x")), ptr(c.vector("weight")), i64(heads), i32(s["D"]),
        f32(c.call.attrs["eps"]),
    ]  # fmt: skip
    c.launch(f"head_norm_{c.dtype('x')}", (blocks(heads, 8), 1, 1), 256, args)


@handles("rope")
def _rope(c: LoweringContext) -> None:
    s = c.sizes
    heads = s["T"] * s["H"]
    args = [
        ptr(c.address("x")), ptr(c.address("positions")), ptr(c.vector("cos_sin")), i64(heads),
        i32(s["H"]), i32(s["D"]),
    ]  # fmt: skip
    c.launch(f"rope_{c.dtype('x')}", (blocks(heads, 8), 1, 1), 256, args)


@handles("kv_append")
def _kv_append(c: LoweringContext) -> None:
    s = c.sizes
    dtype, heads = c.dtype("k"), s["T"] * s["G"]
    narrow = c.dtype("kv") == E4M3 and dtype in ("bf16", "f32")
    if c.dtype("v") != dtype or not (narrow or c.dtype("kv") == dtype):
        raise c.refuse("dtype of the cache", dtype, c.dtype("kv"))
    args = [
        ptr(layer_address(c)), ptr(c.address("k")), ptr(c.address("v")), ptr(c.address("slots")),
        i64(heads), i32(s["G"]), i32(s["D"]), i32(s["S"]), i64(page_stride(c)),
    ]  # fmt: skip
    if narrow:
        args += [f32(inverse) for inverse in inverse_scales(c)]
    c.launch(f"kv_append_{dtype}{f'_{E4M3}' if narrow else ''}", (blocks(heads, 8), 1, 1), 256, args)


@handles("silu_mul")
def _silu_mul(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("gate")
    operands = [c.address(name) for name in ("out", "gate", "up")]
    silu(c, "silu_mul", operands, s["T"] * s["F"], dtype)


def inverse_scales(c: Operands) -> tuple[float, float]:
    """What an 8-bit cache's keys and values are multiplied by when they are stored."""
    return 1 / c.call.attrs["k_scale"], 1 / c.call.attrs["v_scale"]


def page_stride(c: Operands) -> int:
    """Elements from a block to the next: all its layers lie together."""
    s = c.sizes
    return 2 * s["Y"] * s["G"] * s["S"] * s["D"]


def layer_address(c: Operands) -> Place:
    """Of the layer's part of block 0."""
    s = c.sizes
    offset = int(c.call.attrs["layer"]) * 2 * s["G"] * s["S"] * s["D"]
    return c.address("kv") + offset * item_bytes(c.dtype("kv"))
