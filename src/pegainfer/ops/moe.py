"""Mixture of experts: a router sends each token to a few experts, whose results are added up.

A stack of matrices [N, F, M] holds one expert after another. `moe` is the whole block; a shared expert, which
every token meets, is an ordinary `gate_up_swiglu` and `linear` beside it, or a mixture of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.ops import fill
from pegainfer.ops.cases.moe import (
    expert_down_bound,
    expert_down_cases,
    expert_gate_up_bound,
    expert_gate_up_cases,
    moe_bound,
    moe_cases,
    route_bound,
    route_cases,
)
from pegainfer.ops.gemm import LINEAR, product_tolerance
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder
from pegainfer.ops.recurrence import sigmoid
from pegainfer.ops.routing import choose_experts, expert_gates, expert_scores
from pegainfer.ops.spec import INTS, In, OpSpec, Out, Tolerance, Weight, declare
from pegainfer.ops.tensor import Sizes, Tensor

Array = np.ndarray[Any, Any]
# sigmoid: scores are sigmoids of the logits, not a softmax over them. renormalize: gates are shares of the
# chosen experts' scores. scale: multiplies the gates. The groups: see choose_experts.
ROUTING = ("sigmoid", "renormalize", "scale", "groups", "kept_groups")


def _route(
    experts: Array,
    gates: Array,
    logits: Array,
    bias: Array | None = None,
    *,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    groups: int,
    kept_groups: int,
) -> None:
    scores = expert_scores(logits, use_sigmoid=sigmoid)
    experts[...] = choose_experts(logits, scores, bias, experts.shape[1], groups, kept_groups)
    gates[...] = expert_gates(scores, experts, scale, renormalize=renormalize)


def _gate_up(act: Array, h: Array, experts: Array, w_gate: Array, w_up: Array) -> None:
    act[...] = 0
    for expert in range(len(w_gate)):
        tokens, places = np.nonzero(experts == expert)
        rows = h[tokens].astype(np.float64)
        gate, up = (rows @ w[expert].astype(np.float64).T for w in (w_gate, w_up))
        act[tokens, places] = gate * sigmoid(gate) * up


def _down(out: Array, act: Array, experts: Array, gates: Array, w_down: Array) -> None:
    total = np.zeros(out.shape)
    for expert in range(len(w_down)):
        tokens, places = np.nonzero(experts == expert)
        result = act[tokens, places].astype(np.float64) @ w_down[expert].astype(np.float64).T
        np.add.at(total, tokens, gates[tokens, places, None].astype(np.float64) * result)
    out[...] = total


def _moe(
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
    **routing: Any,
) -> None:
    tokens, chosen = experts.shape
    h = b.buffer("h", *x.shape, dtype=x.dtype)
    logits = b.buffer("logits", tokens, w_router.shape[0])
    gates = b.buffer("gates", tokens, chosen)
    act = b.buffer("act", tokens, chosen, w_gate.shape[1], dtype=x.dtype)
    b.emit(RMS_NORM, {"eps": eps}, out=h, x=x, weight=norm)
    b.emit(LINEAR, out=logits, a=h, w=w_router)
    b.emit(ROUTE_EXPERTS, routing, experts=experts, gates=gates, logits=logits, bias=bias)
    b.emit(EXPERT_GATE_UP, act=act, h=h, experts=experts, w_gate=w_gate, w_up=w_up)
    b.emit(EXPERT_DOWN, out=out, act=act, experts=experts, gates=gates, w_down=w_down)


def _weight_bytes(s: Sizes, nbytes: int) -> int:
    """Of the experts that can be chosen at most."""
    return nbytes // s["N"] * min(s["N"], s["T"] * s["K"])


ROUTE_EXPERTS = declare(
    OpSpec(
        name="route_experts",
        doc="the K best experts of each token in ascending order, and the weights of their results",
        operands=(
            Out("experts", "T K", INTS),
            Out("gates", "T K", ("f32",)),
            In("logits", "T N", ("f32",), fill=fill.logits),
            In("bias", "N", ("f32",), optional=True),
        ),
        attrs=ROUTING,
        reference=_route,
        requires=(("K ≤ N", lambda s: s["K"] <= s["N"]),),
        flops=lambda s: 8 * s["T"] * s["N"],
        cases=route_cases,
        tolerance={
            "f32": Tolerance(
                0.0,
                0.0,
                "exponentials of float32 differences, their sum over N, two divisions; float32 may underflow",
                route_bound,
            )
        },
    )
)

EXPERT_GATE_UP = declare(
    OpSpec(
        name="expert_gate_up",
        doc="act = silu(h · w_gate[e]ᵀ) · (h · w_up[e]ᵀ) for each expert e of a token; 0 where e is none",
        operands=(
            Out("act", "T K F"),
            In("h", "T M"),
            In("experts", "T K", INTS, into="N"),
            Weight("w_gate", "N F M"),
            Weight("w_up", "N F M"),
        ),
        reference=_gate_up,
        flops=lambda s: 4 * s["T"] * s["K"] * s["M"] * s["F"],
        bytes=lambda s, held: (
            held["act"]
            + held["h"]
            + held["experts"]
            + _weight_bytes(s, held["w_gate"])
            + _weight_bytes(s, held["w_up"])
        ),
        cases=expert_gate_up_cases,
        tolerance=product_tolerance(expert_gate_up_bound),
    )
)

EXPERT_DOWN = declare(
    OpSpec(
        name="expert_down",
        doc="out = the sum over a token's experts e, in their order, of gate · (act · w_down[e]ᵀ)",
        operands=(
            Out("out", "T M", ("f32",)),
            In("act", "T K F"),
            In("experts", "T K", INTS, into="N"),
            In("gates", "T K", ("f32",)),
            Weight("w_down", "N M F"),
        ),
        reference=_down,
        flops=lambda s: 2 * s["T"] * s["K"] * s["M"] * (s["F"] + 1),
        bytes=lambda s, held: (
            held["out"] + held["act"] + held["experts"] + held["gates"] + _weight_bytes(s, held["w_down"])
        ),
        cases=expert_down_cases,
        tolerance=product_tolerance(expert_down_bound),
    )
)


def moe_bytes(s: Sizes, held: Mapping[str, int]) -> int:
    """Of the experts only as many matrices as tokens can have chosen."""
    small = sum(held[name] for name in ("out", "experts", "x", "norm", "w_router"))
    return small + sum(_weight_bytes(s, held[name]) for name in ("w_gate", "w_up", "w_down"))


MOE = declare(
    OpSpec(
        name="moe",
        doc="each token's weighted sum of SwiGLU experts, chosen by a router, over h = rms_norm(x)",
        operands=(
            Out("out", "T M", ("f32",)),
            Out("experts", "T K", INTS),
            In("x", "T M"),
            In("norm", "M"),
            Weight("w_router", "N M"),
            Weight("w_gate", "N F M"),
            Weight("w_up", "N F M"),
            Weight("w_down", "N M F"),
            In("bias", "N", ("f32",), optional=True),
        ),
        attrs=("eps", *ROUTING),
        lower=_moe,
        cases=moe_cases,
        tolerance={
            "f32": Tolerance(2.0**-23, 0.0, "the errors of norm, router and experts, carried on", moe_bound)
        },
        flops=lambda s: 2 * s["T"] * s["M"] * (s["N"] + 3 * s["K"] * s["F"]),
        bytes=moe_bytes,
    )
)
