"""Lowering of embedding, norms, rotation, cache writes and activation."""

from __future__ import annotations

from pegainfer.kernels.cuda.gemm import rms_norm, silu, take_rows
from pegainfer.kernels.cuda.site import Site, blocks, handles
from pegainfer.runtime.cuda.launch import f32, i32, i64, ptr
from pegainfer.runtime.cuda.tensor import item_bytes

HEADS = (64, 128, 256)  # sizes that the fused kernels are compiled for


@handles("embedding")
def _embedding(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("out")
    table = site.matrix("table", dtype=dtype)
    take_rows(site, table, site.address("ids"), s["T"], s["M"], dtype, site.address("out"), s["V"])


@handles("gather_rows")
def _gather_rows(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("x")
    if site.dtype("out") != dtype:
        raise site.refuse("dtype of out", dtype, site.dtype("out"))
    take_rows(
        site, site.address("x"), site.address("rows"), s["L"], s["M"], dtype, site.address("out"), s["T"]
    )


@handles("rms_norm")
def _rms_norm(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("x")
    if site.dtype("out") != dtype:
        raise site.refuse("dtype of out", dtype, site.dtype("out"))
    weight = site.vector("weight")
    assert weight is not None
    rms_norm(
        site, site.address("out"), site.address("x"), weight, s["T"], s["M"], dtype, site.this.attrs["eps"]
    )


@handles("head_norm")
def _head_norm(site: Site) -> None:
    s = site.sizes()
    heads = s["T"] * s["H"]
    args = [
        ptr(site.address("x")), ptr(site.vector("weight")), i64(heads), i32(s["D"]),
        f32(site.this.attrs["eps"]),
    ]  # fmt: skip
    site.launch(f"head_norm_{site.dtype('x')}", (blocks(heads, 8), 1, 1), 256, args)


@handles("rope")
def _rope(site: Site) -> None:
    s = site.sizes()
    heads = s["T"] * s["H"]
    args = [
        ptr(site.address("x")), ptr(site.address("positions")), ptr(site.vector("cos_sin")), i64(heads),
        i32(s["H"]), i32(s["D"]),
    ]  # fmt: skip
    site.launch(f"rope_{site.dtype('x')}", (blocks(heads, 8), 1, 1), 256, args)


@handles("kv_append")
def _kv_append(site: Site) -> None:
    s = site.sizes()
    dtype, heads = site.dtype("kv"), s["T"] * s["G"]
    if site.dtype("k") != dtype or site.dtype("v") != dtype:
        raise site.refuse("dtype of the cache", site.dtype("k"), dtype)
    args = [
        ptr(layer_address(site)), ptr(site.address("k")), ptr(site.address("v")), ptr(site.address("slots")),
        i64(heads), i32(s["G"]), i32(s["D"]), i32(s["S"]), i64(page_stride(site)),
    ]  # fmt: skip
    site.launch(f"kv_append_{dtype}", (blocks(heads, 8), 1, 1), 256, args)


@handles("silu_mul")
def _silu_mul(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("gate")
    operands = [site.address(name) for name in ("out", "gate", "up")]
    silu(site, "silu_mul", operands, s["T"] * s["F"], dtype)


def page_stride(site: Site) -> int:
    """Elements from a block to the next: all its layers lie together."""
    s = site.sizes()
    return 2 * s["Y"] * s["G"] * s["S"] * s["D"]


def layer_address(site: Site) -> int:
    """Of the layer's part of block 0."""
    s = site.sizes()
    offset = int(site.this.attrs["layer"]) * 2 * s["G"] * s["S"] * s["D"]
    return site.address("kv") + offset * item_bytes(site.dtype("kv"))
