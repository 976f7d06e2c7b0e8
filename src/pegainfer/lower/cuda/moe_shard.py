"""Lowering of a mixture of experts on a rank that holds some of them."""

from __future__ import annotations

from pegainfer.lower.cuda.experts import (
    Slots,
    add_up,
    choose_experts_kernel,
    groups,
    sort,
    spread,
    stream,
    tiles,
)
from pegainfer.lower.cuda.gemm import GemmProblem, project, rms_norm
from pegainfer.lower.cuda.lowering import LoweringContext, blocks, handles
from pegainfer.lower.cuda.moe import route_args, route_tokens, takes_whole
from pegainfer.lower.cuda.plan import Place, ptr
from pegainfer.runtime.cuda.launch import i32, i64


def local_experts(
    c: LoweringContext, local: Place, experts: Place, count: int, first: int, held: int
) -> None:
    """local[i] = experts[i] - first where that is one of the `held` experts, else -1. count: of slots."""
    args = [ptr(local), ptr(experts), i64(count), i32(first), i32(held)]
    c.launch("local_experts", (blocks(count, 256), 1, 1), 256, args)


@handles("local_experts")
def _local_experts(c: LoweringContext) -> None:
    count, attrs = c.sizes["T"] * c.sizes["K"], c.call.attrs
    if count:
        places = c.address("local"), c.address("experts")
        local_experts(c, *places, count, int(attrs["first"]), int(attrs["count"]))


@handles("moe_shard", whole=takes_whole)
def _moe_shard(c: LoweringContext) -> None:
    s, dtype, out = c.sizes, c.dtype("x"), c.address("out")
    tokens, m, f = s["T"], s["M"], s["F"]
    if not tokens:
        return
    h, logits = c.scratch(2 * tokens * m), c.scratch(4 * tokens * s["N"])
    norm = c.vector("norm")
    assert norm is not None
    rms_norm(c, h, c.address("x"), norm, tokens, m, dtype, float(c.call.attrs["eps"]))
    # If ranks chose different experts for a token, their results would not add up to its sum.
    router = GemmProblem(tokens, s["N"], m, dtype, "storef32", alike=True)
    project(c, router, logits, h, c.matrix("w_router", dtype=dtype))
    chosen = Slots(tokens, s["K"], s["N"], c.address("experts"), c.scratch(4 * tokens * s["K"]))
    route_tokens(c, route_args(c, chosen.experts, chosen.gates, logits), tokens, s["N"])
    slots = Slots(tokens, s["K"], s["X"], c.scratch(4 * chosen.count), chosen.gates)
    local_experts(c, slots.experts, chosen.experts, slots.count, int(c.call.attrs["first"]), s["X"])
    # On average an expert has as many slots as in the whole mixture.
    choice = choose_experts_kernel(tokens, s["K"], s["N"], m, f, dtype, c.target.info)
    made = sort(c, choice, slots)
    w_up, w_down = c.matrix("w_gate", "w_up", dtype=dtype, layout="pairs"), c.matrix("w_down", dtype=dtype)
    act = c.scratch(2 * slots.count * f)
    if choice.kind == "stream":
        ungated = Slots(tokens, slots.chosen, slots.num_experts, slots.experts)
        stream(c, choice, ungated, made, h, w_up, 2 * f, m, out=act)
        stream(c, choice, slots, made, act, w_down, m, f, out=out)
    elif choice.kind == "groups":
        x = spread(c, slots, made, h, m, slots.chosen)
        groups(c, choice, slots, made, x, w_up, 2 * f, m, act, "swiglu")
        groups(c, choice, slots, made, act, w_down, m, f, x, "store")  # x has been read: its room is free
        add_up(c, slots, x, made.places, m, dtype, out, None)
    else:
        results = c.scratch(2 * slots.count * m)
        tiles(c, choice, slots, made, h, w_up, 2 * f, m, act, "swiglu", slots.chosen)
        tiles(c, choice, slots, made, act, w_down, m, f, results, "store", 1)
        add_up(c, slots, results, None, m, dtype, out, None)
