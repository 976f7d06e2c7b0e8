"""Fused form of a mixture of experts whose result is added to the residual stream; see ops/fused.py."""

from __future__ import annotations

from typing import Any

from pegainfer.ops.moe import MOE, moe_bytes
from pegainfer.ops.program import Builder
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.spec import InOut, OpSpec, declare_fused
from pegainfer.ops.tensor import Tensor


def _moe_residual(b: Builder, x: Tensor, experts: Tensor, **rest: Any) -> None:
    tensors = {o.name: rest.pop(o.name) for o in MOE.operands if o.name in rest}
    partial = b.buffer("partial", *x.shape)
    b.emit(MOE, rest, out=partial, experts=experts, x=x, **tensors)
    b.emit(REDUCE_RESIDUAL, x=x, partial=partial)


MOE_RESIDUAL = declare_fused(
    OpSpec(
        name="moe_residual",
        doc="x += each token's weighted sum of SwiGLU experts, chosen by a router, over rms_norm(x)",
        operands=(InOut("x", "T M"), *(o for o in MOE.operands if o.name not in ("out", "x"))),
        attrs=MOE.attrs,
        lower=_moe_residual,
        flops=lambda s: MOE.flops(s) + s["T"] * s["M"],
        bytes=lambda s, held: moe_bytes(s, {**held, "out": held["x"]}),
    )
)
