"""Fused forms of latent attention; see ops/fused.py.

`mla_decode`: mla_qkv_append and mla_attention of decoded tokens, without queries in memory between them. The
scaled forms take a norm that was folded into the GEMM before them; see ops/fused_norm.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.fused_norm import scaled
from pegainfer.ops.mla import (
    HEAD_LINEAR,
    LATENT_APPEND,
    LATENT_ATTENTION,
    MLA_ATTENTION,
    MLA_QKV_APPEND,
    ROPE_TAIL,
)
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.spec import In, OpSpec, Out, Weight, declare_fused, run_op
from pegainfer.ops.tensor import Sizes

Array = np.ndarray[Any, Any]


def _finish(
    kv: Array, h: Array, heads: int, wq: Array, w_latent: Array, latent_norm: Array, positions: Array,
    slots: Array, cos_sin: Array, *, latent_eps: float, layer: int,
) -> Array:  # fmt: skip
    """Caches the latents of the normalised stream h; returns its queries."""
    latent = h @ w_latent.astype(np.float64).T
    q = (h @ wq.astype(np.float64).T).reshape(len(h), heads, -1)
    run_op(ROPE_TAIL, q, positions, cos_sin)
    run_op(LATENT_APPEND, kv, latent, latent_norm, positions, slots, cos_sin, layer=layer, eps=latent_eps)
    return q


def _scaled_mla_qkv(
    q: Array, kv: Array, x: Array, squares: Array, wq: Array, w_latent: Array, latent_norm: Array,
    positions: Array, slots: Array, cos_sin: Array, *, eps: float, latent_eps: float, layer: int,
) -> None:  # fmt: skip
    q[...] = _finish(
        kv, scaled(x, squares, eps), q.shape[1], wq, w_latent, latent_norm, positions, slots, cos_sin,
        latent_eps=latent_eps, layer=layer,
    )  # fmt: skip


def _decode(
    out: Array, kv: Array, h: Array, w_k: Array, w_v: Array, rows: tuple[Array, ...], scale: float,
    latent_eps: float, layer: int, **given: Array,
) -> None:  # fmt: skip
    q = _finish(kv, h, out.shape[1], latent_eps=latent_eps, layer=layer, **given)
    absorbed, attended = (np.zeros((*q.shape[:2], n)) for n in (kv.shape[3], w_k.shape[1]))
    run_op(HEAD_LINEAR, absorbed, q, w_k)
    run_op(LATENT_ATTENTION, attended, absorbed, kv, *rows, layer=layer, scale=scale)
    run_op(HEAD_LINEAR, out, attended, w_v)


def _mla_decode(
    out: Array, kv: Array, x: Array, norm: Array, w_k: Array, w_v: Array, query_starts: Array,
    query_lens: Array, context_lens: Array, block_table: Array, *, eps: float, **given: Any,
) -> None:  # fmt: skip
    h = np.empty(x.shape)
    run_op(RMS_NORM, h, x, norm, eps=eps)
    _decode(out, kv, h, w_k, w_v, (query_starts, query_lens, context_lens, block_table), **given)


def _scaled_mla_decode(
    out: Array, kv: Array, x: Array, squares: Array, w_k: Array, w_v: Array, query_starts: Array,
    query_lens: Array, context_lens: Array, block_table: Array, *, eps: float, **given: Any,
) -> None:  # fmt: skip
    rows = query_starts, query_lens, context_lens, block_table
    _decode(out, kv, scaled(x, squares, eps), w_k, w_v, rows, **given)


def _of_qkv(*names: str) -> tuple[Any, ...]:
    return tuple(MLA_QKV_APPEND.operand(name) for name in names)


SCALED_MLA_QKV_APPEND = declare_fused(
    OpSpec(
        name="scaled_mla_qkv_append",
        doc="mla_qkv_append of x that linear_residual_norm has left, without a narrow GEMM for queries",
        operands=(
            *_of_qkv("q", "kv", "x"),
            In("squares", "Z I", ("f32",)),
            Weight("wq", "A M"),
            *_of_qkv("w_latent", "latent_norm", "positions", "slots", "cos_sin"),
        ),
        attrs=MLA_QKV_APPEND.attrs,
        idle=MLA_QKV_APPEND.idle,
        requires=MLA_QKV_APPEND.requires,
        reference=_scaled_mla_qkv,
        flops=lambda s: 2 * s["T"] * (s["A"] + s["D"]) * s["M"],
        bytes=lambda s, held: (
            sum(held[name] for name in ("q", "x", "squares", "wq", "w_latent"))
            + held["kv"] // (s["N"] * s["Y"] * s["S"]) * s["T"]
        ),
    )
)

_PROJECTED = (Weight("wq", "A M"), *_of_qkv("w_latent", "latent_norm", "positions", "slots", "cos_sin"))
# V: channels of a head's values, which mla_attention calls A.
_ATTENDED = (
    Weight("w_k", "H K X"),
    Weight("w_v", "H V K"),
    *(MLA_ATTENTION.operand(n) for n in ("query_starts", "query_lens", "context_lens", "block_table")),
)


def _decode_flops(s: Sizes) -> int:
    attention = s.get("Q", s["T"]) * s["H"] * (s["D"] + s["K"])
    return 2 * (s["T"] * ((s["A"] + s["D"]) * s["M"] + s["H"] * s["K"] * (s["X"] + s["V"])) + attention)


def _decode_bytes(s: Sizes, held: Sizes) -> int:
    row = held["kv"] // (s["N"] * s["Y"] * s["S"])
    return sum(held[n] for n in ("out", "x", "wq", "w_latent", "w_k", "w_v")) + row * s.get("C", s["T"])


_DECODE: dict[str, Any] = {
    "attrs": ("eps", "latent_eps", "layer", "scale"),
    "idle": "NYPW",
    "cost_axes": "CQ",
    "requires": (
        ("A = H · (X + B)", lambda s: s["A"] == s["H"] * (s["X"] + s["B"])),
        ("D = K + B, B even", lambda s: s["D"] == s["K"] + s["B"] and s["B"] % 2 == 0),
    ),
    "flops": _decode_flops,
    "bytes": _decode_bytes,
}

MLA_DECODE = declare_fused(
    OpSpec(
        name="mla_decode",
        doc="mla_qkv_append and mla_attention of rows of one token",
        operands=(Out("out", "T H V"), *_of_qkv("kv", "x", "norm"), *_PROJECTED, *_ATTENDED),
        reference=_mla_decode,
        **_DECODE,
    )
)

SCALED_MLA_DECODE = declare_fused(
    OpSpec(
        name="scaled_mla_decode",
        doc="mla_decode of x that linear_residual_norm has left",
        operands=(
            Out("out", "T H V"),
            *_of_qkv("kv", "x"),
            In("squares", "Z I", ("f32",)),
            *_PROJECTED,
            *_ATTENDED,
        ),
        reference=_scaled_mla_decode,
        **_DECODE,
    )
)
