"""A layer of linear attention from the residual stream up to its output projection, as one coarse op."""

from __future__ import annotations

from collections.abc import Mapping

from pegainfer.ops.cases.gated_delta import gated_delta_bound, gated_delta_cases
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE, ROWS, STATES
from pegainfer.ops.gemm import LINEAR, product_tolerance
from pegainfer.ops.norm import GATED_RMS_NORM, RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.spec import In, OpSpec, Out, State, Weight, declare
from pegainfer.ops.tensor import Sizes, Tensor


def _lower(
    b: Builder,
    out: Tensor,
    conv: Tensor,
    delta: Tensor,
    x: Tensor,
    norm: Tensor,
    w_qkv: Tensor,
    w_z: Tensor,
    w_a: Tensor,
    w_b: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    out_norm: Tensor,
    *,
    layer: int,
    eps: float,
    key_eps: float,
    tiled: int,
    **rows: Tensor,
) -> None:
    tokens, heads, _ = out.shape
    h = b.buffer("h", *x.shape, dtype=out.dtype)
    qkv, mixed_qkv = (b.buffer(n, tokens, w_qkv.shape[0], dtype=out.dtype) for n in ("qkv", "mixed_qkv"))
    z, mixed = (b.buffer(n, *out.shape, dtype=out.dtype) for n in ("z", "mixed"))
    a, beta = (b.buffer(n, tokens, heads, dtype=out.dtype) for n in ("a", "b"))
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    for to, w in ((qkv, w_qkv), (z.view(tokens, w_z.shape[0]), w_z), (a, w_a), (beta, w_b)):
        b.emit(LINEAR, out=to, a=h, w=w)
    b.emit(CAUSAL_CONV_SILU, {"layer": layer}, out=mixed_qkv, conv=conv, x=qkv, taps=taps, **rows)
    b.emit(
        GATED_DELTA_RULE, {"layer": layer, "eps": key_eps, "tiled": tiled},
        out=mixed, delta=delta, qkv=mixed_qkv, a=a, b=beta, a_log=a_log, dt_bias=dt_bias, **rows,
    )  # fmt: skip
    b.emit(GATED_RMS_NORM, {"eps": eps}, out=out, x=mixed, gate=z, weight=out_norm)


def layer_flops(s: Sizes) -> int:
    products = 2 * s["T"] * s["M"] * (s["F"] + s["A"] + 2 * s["H"])
    parts = (CAUSAL_CONV_SILU.flops(s), GATED_DELTA_RULE.flops(s), 10 * s["T"] * s["H"] * s["V"])
    return products + sum(parts)


def layer_bytes(s: Sizes, held: Mapping[str, int]) -> int:
    once = ("out", "x", "w_qkv", "w_z", "w_a", "w_b", "taps")
    states = (held["conv"] + held["delta"]) // (s["N"] * s["Y"]) * s["R"]
    return sum(held[name] for name in once) + 2 * states


OUTPUTS = (Out("out", "T H V"), State("conv", "N Y X F"), State("delta", "N Y H K V", STATES))
WEIGHTS = (Weight("w_qkv", "F M"), Weight("w_z", "A M"), Weight("w_a", "H M"), Weight("w_b", "H M"))
VECTORS = (In("taps", "W F"), In("a_log", "H"), In("dt_bias", "H"), In("out_norm", "V"))
ATTRS = ("layer", "eps", "key_eps", "tiled")  # eps: of both norms; key_eps and tiled: GATED_DELTA_RULE's
REQUIRES = (
    *CAUSAL_CONV_SILU.requires,
    *GATED_DELTA_RULE.requires,
    ("A = H · V", lambda s: s["A"] == s["H"] * s["V"]),
)

GATED_DELTA = declare(
    OpSpec(
        name="gated_delta",
        doc="q, k, v, gate, a, b from the normalised residual stream; convolution, delta rule, gated norm",
        operands=(*OUTPUTS, In("x", "T M"), In("norm", "M"), *WEIGHTS, *VECTORS, *ROWS),
        attrs=ATTRS,
        lower=_lower,
        idle="NY",
        sequential=True,
        flops=layer_flops,
        bytes=layer_bytes,
        requires=REQUIRES,
        cases=gated_delta_cases,
        tolerance=product_tolerance(gated_delta_bound),
    )
)
