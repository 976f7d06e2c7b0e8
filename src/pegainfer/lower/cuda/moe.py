"""Lowering of a mixture of experts: router, GEMMs with the chosen experts' matrices, weighted sums."""

from __future__ import annotations

from pegainfer.lower.cuda.experts import (
    ExpertChoice,
    Lists,
    Slots,
    add_up,
    choose_experts_kernel,
    groups,
    lists,
    sort,
    sort_args,
    spread,
    stream,
    tiles,
)
from pegainfer.lower.cuda.experts_few import few_experts, takes_few
from pegainfer.lower.cuda.gemm import GemmProblem, project, rms_norm
from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.lower.cuda.plan import ARRIVALS, Place, Struct, struct
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries
from pegainfer.ops.fused_moe import MOE_RESIDUAL
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.arguments import ROUTE_EXPERTS, ROUTE_FEW
from pegainfer.runtime.cuda.tensor import item_bytes

ROUTE_WARPS, MOST_CHOSEN = 4, 32  # WARPS of route.cu, and one choice a lane
FEW_WARPS, FEW_TOKENS = 8, 8  # WARPS and TOKENS of route_few.cu


# The sum added to the residual stream


def _onto_residual(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    moe, add = calls[:2]
    if step.target.ranks > 1:
        return "one rank"
    out = moe.tensors["out"].storage
    if add.tensors["partial"].storage is not out or out.kind is not Kind.BUFFER or is_read(calls[2:], out):
        return "a sum that only the residual stream reads"
    if add.tensors["x"].storage is not moe.tensors["x"].storage or not takes_whole(moe):
        return "experts of the residual stream itself, in bf16"
    operands = {name: t for name, t in moe.tensors.items() if name != "out"}
    return [OpCall.of(MOE_RESIDUAL, moe.attrs, **operands)]


ADD_EXPERTS = Rule("add_experts", (frozenset({"moe"}), frozenset({"reduce_residual"})), _onto_residual)


# Launches


def takes_whole(call: OpCall) -> bool:
    """Whether the kernels of bf16 take the call."""
    x, w_gate = call.tensors["x"], call.tensors["w_gate"]
    widths = (x.shape[1], w_gate.shape[1])
    return x.dtype == "bf16" and all(isinstance(n, int) and n % 8 == 0 for n in widths)


@handles("moe", "moe_residual", "moe_residual_norm", whole=takes_whole)
def _moe(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    if not s["T"]:
        return
    tokens, m, f = s["T"], s["M"], s["F"]
    out = c.address("out") if "out" in c.call.tensors else None
    residual = None if out else c.address("x")
    if takes_few(c.call.attrs, s, dtype, c.target.info):
        logits = c.scratch(4 * tokens * s["N"])
        few_experts(c, route_args(c, c.address("experts"), None, logits), logits, out, residual)
        return
    slots = Slots(tokens, s["K"], s["N"], c.address("experts"), c.scratch(4 * tokens * s["K"]))
    choice = choose_experts_kernel(tokens, s["K"], s["N"], m, f, dtype, c.target.info)
    h, logits = c.scratch(2 * tokens * m), c.scratch(4 * tokens * s["N"])
    route = route_args(c, slots.experts, slots.gates, logits)
    streamed = choice.kind == "stream"
    if streamed or (choice.kind == "groups" and tokens <= FEW_TOKENS):
        made = _route_few(c, slots, lists(c, choice, slots, early=streamed), choice, route, h, logits)
    else:
        norm = c.vector("norm")
        assert norm is not None
        rms_norm(c, h, c.address("x"), norm, tokens, m, dtype, float(c.call.attrs["eps"]))
        # If ranks chose different experts for a token, they would add up parts of different sums.
        problem = GemmProblem(tokens, s["N"], m, dtype, "storef32", alike=c.target.ranks > 1)
        project(c, problem, logits, h, c.matrix("w_router", dtype=dtype))
        route_tokens(c, route, tokens, s["N"])
        made = sort(c, choice, slots)
    w_up, w_down = c.matrix("w_gate", "w_up", dtype=dtype, layout="pairs"), c.matrix("w_down", dtype=dtype)
    act = c.scratch(2 * slots.count * f)
    if choice.kind == "stream":
        ungated = Slots(tokens, slots.chosen, slots.num_experts, slots.experts)
        stream(c, choice, ungated, made, h, w_up, 2 * f, m, out=act)
        stream(c, choice, slots, made, act, w_down, m, f, out=out, residual=residual)
        return
    if choice.kind == "groups":
        x = spread(c, slots, made, h, m, slots.chosen)
        groups(c, choice, slots, made, x, w_up, 2 * f, m, act, "swiglu")
        groups(c, choice, slots, made, act, w_down, m, f, x, "store")  # x has been read: its room is free
        add_up(c, slots, x, made.places, m, dtype, out, residual)
        return
    results = c.scratch(2 * slots.count * m)
    tiles(c, choice, slots, made, h, w_up, 2 * f, m, act, "swiglu", slots.chosen)
    tiles(c, choice, slots, made, act, w_down, m, f, results, "store", 1)
    add_up(c, slots, results, None, m, dtype, out, residual)


def route_args(c: LoweringContext, experts: Place, gates: Place | None, logits: Place) -> Struct:
    """route::Args. Raises UnsupportedError for a routing that the kernels do not serve."""
    s, attrs = c.sizes, c.call.attrs
    if s["K"] > MOST_CHOSEN:
        raise c.refuse("experts of a token", f"at most {MOST_CHOSEN}", s["K"])
    most = 48 * 1024 // (12 * ROUTE_WARPS)
    if s["N"] > most:
        raise c.refuse("experts", f"at most {most}", s["N"])
    groups, kept = int(attrs["groups"]), int(attrs["kept_groups"])
    if s["N"] % groups or not 0 < kept <= groups or s["K"] > kept * (s["N"] // groups):
        raise c.refuse("groups", f"divisors of {s['N']} with {s['K']} experts in those kept", (groups, kept))
    return struct(
        ROUTE_EXPERTS, experts=experts, gates=gates, logits=logits, bias=c.vector("bias"),
        tokens=s["T"], n=s["N"], k=s["K"], sigmoid=int(attrs["sigmoid"]),
        renormalize=int(attrs["renormalize"]), groups=groups, kept_groups=kept, scale=float(attrs["scale"]),
    )  # fmt: skip


def route_tokens(c: LoweringContext, args: Struct, tokens: int, num_experts: int) -> None:
    grid = (blocks(tokens, ROUTE_WARPS), 1, 1)
    c.launch("route_experts", grid, 32 * ROUTE_WARPS, [args], 12 * ROUTE_WARPS * num_experts)


def _route_few(
    c: LoweringContext,
    slots: Slots,
    made: Lists,
    choice: ExpertChoice,
    route: Struct,
    h: Place,
    logits: Place,
) -> Lists:
    """Norm, router and sorted slots of a few tokens in one launch."""
    s = c.sizes
    norm = c.vector("norm")
    args = struct(
        ROUTE_FEW, h=h, logits=logits, x=c.address("x"), norm=norm, w=c.matrix("w_router", dtype="bf16"),
        arrivals=Place(ARRIVALS), m=s["M"], eps=float(c.call.attrs["eps"]),
    )  # fmt: skip
    grid = (blocks(s["N"], FEW_WARPS), blocks(s["T"], FEW_TOKENS), 1)
    shared = max(2 * FEW_TOKENS * s["M"], 12 * FEW_WARPS * s["N"])
    why = f"{s['T']} tokens: norm, router and order in one launch"
    sorting = sort_args(made, choice, slots, None, 0)
    c.launch("route_few", grid, 32 * FEW_WARPS, [route, sorting, args], shared, why=why)
    return made


@handles("route_experts")
def _route_experts(c: LoweringContext) -> None:
    s = c.sizes
    slots = Slots(s["T"], s["K"], s["N"], c.address("experts"), c.address("gates"))
    route = route_args(c, slots.experts, slots.gates, c.address("logits"))
    route_tokens(c, route, s["T"], s["N"])


@handles("expert_gate_up")
def _expert_gate_up(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("h")
    if c.dtype("act") != dtype or dtype == "f16":
        raise c.refuse("dtypes of h and act", "bf16 or f32, both", (dtype, c.dtype("act")))
    if not s["T"]:
        return
    slots = Slots(s["T"], s["K"], s["N"], c.address("experts"))
    choice = choose_experts_kernel(s["T"], s["K"], s["N"], s["M"], s["F"], dtype, c.target.info)
    out, x, n, k = c.address("act"), c.address("h"), 2 * s["F"], s["M"]
    w = c.matrix("w_gate", "w_up", dtype=dtype, layout="pairs")
    made = sort(c, choice, slots, out, s["F"] * item_bytes(dtype)) if choice.tile else None
    if choice.kind == "stream" and made:
        stream(c, choice, slots, made, x, w, n, k, out=out)
    elif choice.kind == "groups" and made:
        x = spread(c, slots, made, x, k, slots.chosen)
        groups(c, choice, slots, made, x, w, n, k, out, "swiglu", made.order)
    else:
        tiles(c, choice, slots, made, x, w, n, k, out, "swiglu", slots.chosen)


@handles("expert_down")
def _expert_down(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("act")
    if dtype == "f16":
        raise c.refuse("dtype of act", "bf16 or f32", dtype)
    if not s["T"]:
        return
    slots = Slots(s["T"], s["K"], s["N"], c.address("experts"), c.address("gates"))
    choice = choose_experts_kernel(s["T"], s["K"], s["N"], s["M"], s["F"], dtype, c.target.info)
    out, x, n, k = c.address("out"), c.address("act"), s["M"], s["F"]
    w = c.matrix("w_down", dtype=dtype)
    made = sort(c, choice, slots) if choice.tile else None
    if choice.kind == "stream" and made:
        stream(c, choice, slots, made, x, w, n, k, out=out)
        return
    results = c.scratch(slots.count * n * item_bytes(dtype))
    if choice.kind == "groups" and made:
        x = spread(c, slots, made, x, k, 1)
        groups(c, choice, slots, made, x, w, n, k, results, "store")
        add_up(c, slots, results, made.places, n, dtype, out, None)
    else:
        tiles(c, choice, slots, made, x, w, n, k, results, "store", 1)
        add_up(c, slots, results, None, n, dtype, out, None)
