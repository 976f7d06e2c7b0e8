"""A mixture of experts on a rank that holds some of them.

Every rank routes all tokens in the same way and multiplies with the experts that it holds; the sum over ranks
is that of the whole mixture.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.moe import held_ids, moe_bound
from pegainfer.ops.cases.moe_shard import local_experts_cases, moe_shard_cases
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.moe import EXPERT_DOWN, EXPERT_GATE_UP, MOE, ROUTE_EXPERTS, ROUTING
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.spec import INTS, In, OpSpec, Out, Tolerance, Weight, declare
from pegainfer.ops.tensor import Tensor

Array = np.ndarray[Any, Any]


def _local_experts(local: Array, experts: Array, *, first: int, count: int) -> None:
    local[...] = held_ids(experts, int(first), int(count))


LOCAL_EXPERTS = declare(
    OpSpec(
        name="local_experts",
        doc="places of experts among those held, first … first + count; -1 where one is not held",
        operands=(Out("local", "T K", INTS), In("experts", "T K", INTS)),
        attrs=("first", "count"),
        reference=_local_experts,
        cases=local_experts_cases,
        tolerance={"f32": Tolerance(0.0, 0.0, "whole numbers")},
    )
)


def _moe_shard(
    b: Builder,
    out: Tensor,
    experts: Tensor,
    x: Tensor,
    norm: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    first: int,
    count: int,
    **routing: Any,
) -> None:
    tokens, chosen = experts.shape
    h = b.buffer("h", *x.shape, dtype=x.dtype)
    logits = b.buffer("logits", tokens, w_router.shape[0])
    gates = b.buffer("gates", tokens, chosen)
    local = b.buffer("local", tokens, chosen, dtype="i32")
    act = b.buffer("act", tokens, chosen, w_gate.shape[1], dtype=x.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    b.emit(LINEAR, out=logits, a=h, w=w_router)
    b.emit(ROUTE_EXPERTS, routing, experts=experts, gates=gates, logits=logits, bias=bias)
    b.emit(LOCAL_EXPERTS, {"first": first, "count": count}, local=local, experts=experts)
    b.emit(EXPERT_GATE_UP, act=act, h=h, experts=local, w_gate=w_gate, w_up=w_up)
    b.emit(EXPERT_DOWN, out=out, act=act, experts=local, gates=gates, w_down=w_down)


MOE_SHARD = declare(
    OpSpec(
        name="moe_shard",
        doc="the part of `moe` that the `count` experts from `first` on contribute, of all N",
        operands=(
            *(o for o in MOE.operands if not o.name.startswith(("w_", "bias"))),
            Weight("w_router", "N M"),
            Weight("w_gate", "X F M"),
            Weight("w_up", "X F M"),
            Weight("w_down", "X M F"),
            In("bias", "N", ("f32",), optional=True),
        ),
        attrs=("eps", "first", "count", *ROUTING),
        lower=_moe_shard,
        cases=moe_shard_cases,
        tolerance={
            "f32": Tolerance(2.0**-23, 0.0, "the errors of norm, router and experts, carried on", moe_bound)
        },
        # In the mean over ranks: each token meets its share of the K experts here.
        flops=lambda s: 2 * s["T"] * s["M"] * (s["N"] + 3 * s["K"] * s["F"] * s["X"] // s["N"]),
        bytes=lambda s, held: (
            sum(held[name] for name in ("out", "experts", "x", "norm", "w_router"))
            + sum(
                held[name] // s["X"] * min(s["X"], s["T"] * s["K"]) for name in ("w_gate", "w_up", "w_down")
            )
        ),
    )
)


def emit_experts(b: Builder, attrs: dict[str, Any], first: int, **tensors: Tensor | None) -> None:
    """A mixture of experts, whole or of a rank that holds those from `first` on.

    Args:
        attrs, tensors: of `moe`; the stacks hold what this rank has.
    """
    router, stack = tensors["w_router"], tensors["w_gate"]
    assert router is not None and stack is not None
    if router.shape[0] == stack.shape[0]:
        b.emit(MOE, attrs, **tensors)
    else:
        b.emit(MOE_SHARD, {**attrs, "first": first, "count": stack.shape[0]}, **tensors)
