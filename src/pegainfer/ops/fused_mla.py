"""The fused form of mla_qkv_append whose norm was folded into the GEMM before it; see ops/fused_norm.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.fused_norm import scaled
from pegainfer.ops.mla import LATENT_APPEND, MLA_QKV_APPEND, ROPE_TAIL
from pegainfer.ops.spec import In, OpSpec, Weight, declare_fused, run_op

Array = np.ndarray[Any, Any]


def _scaled_mla_qkv(
    q: Array, kv: Array, x: Array, squares: Array, wq: Array, w_latent: Array, latent_norm: Array,
    positions: Array, slots: Array, cos_sin: Array, *, eps: float, latent_eps: float, layer: int,
) -> None:  # fmt: skip
    h = scaled(x, squares, eps)
    latent = h @ w_latent.astype(np.float64).T
    heads = (h @ wq.astype(np.float64).T).reshape(q.shape)
    run_op(ROPE_TAIL, heads, positions, cos_sin)
    q[...] = heads
    run_op(LATENT_APPEND, kv, latent, latent_norm, positions, slots, cos_sin, layer=layer, eps=latent_eps)


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
