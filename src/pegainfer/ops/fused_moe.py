"""Fused forms of a mixture of experts whose result is added to the residual stream; see ops/fused.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.ops.coarse import GATE_UP_SWIGLU
from pegainfer.ops.fused_norm import REDUCE_RESIDUAL_NORM
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import MOE, moe_bytes
from pegainfer.ops.program import Builder
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.spec import In, InOut, OpSpec, Out, Weight, declare_fused
from pegainfer.ops.tensor import Sizes, Tensor

SHARED = ("shared_gate", "shared_up", "shared_down", "shared_router")
GATED = {"sigmoid": True, "renormalize": False, "scale": 1.0, "groups": 1, "kept_groups": 1}


def _sums(b: Builder, x: Tensor, **rest: Any) -> list[Tensor]:
    """Emits what is to be added to x: the sum of the chosen experts, and the shared one's result."""
    shared = {name: rest.pop(name, None) for name in SHARED}
    tensors = {o.name: rest.pop(o.name) for o in MOE.operands if o.name in rest}
    partial = b.buffer("partial", *x.shape)
    b.emit(MOE, rest, out=partial, x=x, **tensors)
    gate, up, down = (shared[name] for name in SHARED[:3])
    if gate is None or up is None or down is None:
        return [partial]
    result, router = b.buffer("shared", *x.shape), shared["shared_router"]
    common: dict[str, Any] = {"x": x, "norm": tensors["norm"]}
    if router is not None:  # a mixture of one
        wide = {name: w.view(1, *w.shape) for name, w in (("w_gate", gate), ("w_up", up), ("w_down", down))}
        chosen = b.buffer("shared_experts", x.shape[0], 1, dtype="i32")
        attrs = {"eps": rest["eps"], **GATED}
        b.emit(MOE, attrs, out=result, experts=chosen, w_router=router, **wide, **common)
    else:
        act = b.buffer("shared_act", x.shape[0], gate.shape[0], dtype=x.dtype)
        b.emit(GATE_UP_SWIGLU, {"eps": rest["eps"]}, out=act, w_gate=gate, w_up=up, **common)
        b.emit(LINEAR, out=result, a=act, w=down)
    return [partial, result]


def _moe_residual(b: Builder, x: Tensor, **rest: Any) -> None:
    for partial in _sums(b, x, **rest):
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)


def _moe_residual_norm(
    b: Builder, x: Tensor, normed: Tensor, squares: Tensor, next_norm: Tensor, part: int, **rest: Any
) -> None:
    *others, last = _sums(b, x, **rest)
    for partial in others:
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(
        REDUCE_RESIDUAL_NORM, {"part": part},
        x=x, normed=normed, squares=squares, partial=last, norm=next_norm,
    )  # fmt: skip


def _bytes(s: Sizes, held: Mapping[str, int]) -> int:
    return moe_bytes(s, {**held, "out": held["x"]}) + sum(held.get(name, 0) for name in SHARED)


def _flops(s: Sizes) -> int:
    return MOE.flops(s) + s["T"] * s["M"] * (1 + 6 * s.get("S", 0))


INPUTS = (
    *(o for o in MOE.operands if o.name not in ("out", "x")),
    Weight("shared_gate", "S M", optional=True),
    Weight("shared_up", "S M", optional=True),
    Weight("shared_down", "M S", optional=True),
    Weight("shared_router", "O M", optional=True),  # O = 1: a sigmoid weights the shared expert's result
)
MOE_RESIDUAL = declare_fused(
    OpSpec(
        name="moe_residual",
        doc="x += each token's weighted sum of SwiGLU experts over rms_norm(x), chosen and shared",
        operands=(InOut("x", "T M"), *INPUTS),
        attrs=MOE.attrs,
        lower=_moe_residual,
        flops=_flops,
        bytes=_bytes,
    )
)

MOE_RESIDUAL_NORM = declare_fused(
    OpSpec(
        name="moe_residual_norm",
        doc="moe_residual; normed = x · next_norm; squares: sums of x² over parts of each row",
        operands=(
            InOut("x", "T M"),
            Out("normed", "T M"),
            Out("squares", "Z X", ("f32",)),  # X: room for tokens, at least T
            In("next_norm", "M"),
            *INPUTS,
        ),
        attrs=(*MOE.attrs, "part"),  # part: columns whose squares are summed together
        lower=_moe_residual_norm,
        flops=lambda s: _flops(s) + 3 * s["T"] * s["M"],
        bytes=_bytes,
    )
)
