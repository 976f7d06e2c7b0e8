"""Experts of up to 8 tokens on Hopper (sm90/moe/few.cuh): router, gate and up, down, in three launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.lower.cuda.gemm import choose_gemm
from pegainfer.lower.cuda.linear import SCALED, gemm_problem
from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks
from pegainfer.lower.cuda.plan import Boxes, Place, Struct, struct
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, with_op
from pegainfer.lower.cuda.skinny import MAX_TOKENS, SkinnyChoice
from pegainfer.lower.cuda.target import SYSTEM
from pegainfer.ops.fused_moe import GATED, MOE_RESIDUAL, MOE_RESIDUAL_NORM
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.arguments import EXPERTS_DOWN, EXPERTS_UP, ROUTER_LOGITS
from pegainfer.runtime.cuda.device import DeviceInfo

TOKENS, MOST_CHOSEN, MOST_EXPERTS = 8, 32, 512
THREADS, LOGIT_THREADS = 288, 256
BOX, COLUMNS = 64, 512  # columns of a box; of a stage of the up projections, one box for each of 8 warps
PARTIAL = 8 * 16 * TOKENS * 4  # bytes of the partial sums of a tile by 8 warps
MOST_BOXES = 12  # in a stage of the down projections; a warp can take two (MOST of few.cuh)


def takes_few(attrs: Mapping[str, Any], s: Mapping[str, int], dtype: str, info: DeviceInfo) -> bool:
    """Whether these kernels serve a mixture of experts of these sizes."""
    return (
        info.capability == (9, 0)
        and dtype == "bf16"
        and 0 < s["T"] <= TOKENS
        and s["K"] <= MOST_CHOSEN
        and s["N"] <= (MOST_EXPERTS if s["M"] <= 4 * COLUMNS else 128)
        and attrs["kept_groups"] >= attrs["groups"]
        and s["M"] % BOX == 0
        and s["M"] <= 8 * COLUMNS
        and s["F"] % BOX == 0
    )


# A shared expert beside the others


def _with_shared(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    """Joins gate_up_swiglu, moe, reduce_residual and linear_residual: a shared expert without a gate."""
    gate_up, moe, add, down = (c.tensors for c in calls[:4])
    chained = gate_up["out"].storage is down["a"].storage and moe["out"].storage is add["partial"].storage
    alike = calls[0].attrs["eps"] == calls[1].attrs["eps"] and len(
        {t["x"].storage for t in (gate_up, moe, add, down)}
    ) == 1  # fmt: skip
    if not chained or not alike or gate_up["norm"].storage is not moe["norm"].storage:
        return "a shared expert of the same x, through the same norm"
    if is_read(calls[4:], gate_up["out"].storage) or is_read(calls[4:], moe["out"].storage):
        return "results that only the residual stream reads"
    shared = {"shared_gate": gate_up["w_gate"], "shared_up": gate_up["w_up"], "shared_down": down["w"]}
    return _shared(calls[1], shared, step)


def _with_gated(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    """Joins a moe, a moe of one expert and both sums: a shared expert with a gate."""
    moe, one, *adds = (c.tensors for c in calls[:4])
    routing = {name: calls[1].attrs[name] for name in GATED}
    sums = {t["partial"].storage for t in adds} == {moe["out"].storage, one["out"].storage}
    alike = calls[0].attrs["eps"] == calls[1].attrs["eps"] and len(
        {t["x"].storage for t in (moe, one, *adds)}
    ) == 1  # fmt: skip
    if one["w_router"].shape[0] != 1 or routing != GATED or "bias" in one:
        return "a mixture of one whose gate is a sigmoid"
    if not sums or not alike or one["norm"].storage is not moe["norm"].storage:
        return "a shared expert of the same x, through the same norm"
    if is_read(calls[4:], one["out"].storage) or is_read(calls[4:], moe["out"].storage):
        return "results that only the residual stream reads"
    shared = {
        f"shared_{name}": one[f"w_{name}"].view(*one[f"w_{name}"].shape[1:])
        for name in ("gate", "up", "down")
    }
    return _shared(calls[0], {**shared, "shared_router": one["w_router"]}, step)


def _shared(moe: OpCall, shared: dict[str, Tensor], step: Step) -> list[OpCall] | str:
    sizes, x = moe.sizes(step.env), moe.tensors["x"]
    if step.target.ranks > 1 or not takes_few(moe.attrs, sizes, x.dtype, step.target.info):
        return f"one rank and a few tokens on Hopper, not {sizes['T']}"
    width = shared["shared_gate"].shape[0]
    if not isinstance(width, int) or width % sizes["F"]:
        return f"a shared expert as wide as some others, not {width}"
    if any(t.dtype != "bf16" for t in shared.values()):
        return "a shared expert in bf16"
    operands = {name: t for name, t in moe.tensors.items() if name != "out"}
    return [OpCall.of(MOE_RESIDUAL, moe.attrs, **operands, **shared)]


ADD_SHARED = Rule(
    "add_shared_expert",
    tuple(frozenset({op}) for op in ("gate_up_swiglu", "moe", "reduce_residual", "linear_residual")),
    _with_shared,
)
ADD_GATED = Rule(
    "add_gated_expert",
    tuple(frozenset({op}) for op in ("moe", "moe", "reduce_residual", "reduce_residual")),
    _with_gated,
)


# The beginning of the norm that follows


def _fold_norm(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    moe, after = calls[:2]
    x, norm, sizes = after.tensors["x"], after.tensors["norm"], moe.sizes(step.env)
    if x.storage is not moe.tensors["x"].storage or norm.kind is not Kind.WEIGHT:
        return "a norm of the same x, whose weight is constant"
    if not takes_few(moe.attrs, sizes, x.dtype, step.target.info):
        return f"a few tokens on Hopper, not {sizes['T']}"
    choice = choose_gemm(gemm_problem(after, after.sizes(step.env), step.target), step.target)
    if not isinstance(choice, SkinnyChoice) or choice.most_tokens != MAX_TOKENS:
        return "a GEMM by Hopper's kernel of few rows behind the norm"
    part = down_rows(sizes["M"], step.target.info)
    normed = temporaries.tensor("normed residual", *x.shape, dtype=x.dtype)
    squares = temporaries.tensor("squares behind experts", sizes["M"] // part, MAX_TOKENS, dtype="f32")
    operands = with_op(moe, normed=normed, squares=squares, next_norm=norm)
    first = OpCall.of(MOE_RESIDUAL_NORM, {**moe.attrs, "part": part}, **operands)
    operands = with_op(after, x=normed, squares=squares)
    del operands["norm"]
    return [first, OpCall.of(SCALED[after.spec.name], after.attrs, **operands)]


NORM_AFTER_EXPERTS = Rule("norm_after_experts", (frozenset({"moe_residual"}), frozenset(SCALED)), _fold_norm)


# Launches


def few_experts(
    c: LoweringContext, route: Struct, logits: Place, out: Place | None, residual: Place | None
) -> None:
    """Launches router, up and down projections. route: route::Args that read `logits`, [T, N] float32.
    The sums go to `out`, [T, M] float32, or are added to `residual`; the other of the two is None.
    """
    s, info, folds = c.sizes, c.target.info, c.call.spec is MOE_RESIDUAL_NORM
    tokens, m, f, shared = s["T"], s["M"], s["F"], s.get("S", 0) // s["F"]
    matrices = shared + min(tokens * s["K"], s["N"])
    h, scales = c.scratch(2 * tokens * m), c.scratch(4 * tokens)
    act = c.scratch(2 * matrices * TOKENS * f)
    gate = c.matrix("shared_router", dtype="bf16") if "shared_router" in c.call.tensors else None
    shared_gates = c.scratch(4 * tokens) if gate else None
    norm = c.vector("norm")
    args = struct(
        ROUTER_LOGITS, h=h, scales=scales, logits=logits, x=c.address("x"), norm=norm,
        w=c.matrix("w_router", dtype="bf16"), w_shared=gate, shared_gates=shared_gates,
        tokens=tokens, n=s["N"], m=m, eps=float(c.call.attrs["eps"]),
    )  # fmt: skip
    why = f"{tokens} tokens: every block of the next two launches chooses the experts"
    grid = (min(s["N"] + (gate is not None), info.num_sms), 1, 1)
    c.launch(f"router_logits_bf16_{blocks(m, 8 * LOGIT_THREADS)}", grid, LOGIT_THREADS, [args], why=why)
    listed = 4 * s["N"] + matrices * (8 + 4 * TOKENS) + 16
    room = min(info.shared_per_sm // 2 - SYSTEM, info.max_shared)  # a block of the next launch fits beside
    most = next(r for r in (4, 8, 16) if s["N"] <= 32 * r)

    rows, chunks = even_rows(matrices * 2 * f, info), blocks(m, COLUMNS)
    stage, rest = rows * COLUMNS * 2, 2 * PARTIAL + listed
    depth = (room - rest) // (stage + 16)
    args = struct(
        EXPERTS_UP, act=act, h=h, scales=scales, shared_gates=shared_gates, tokens=tokens, shared=shared,
        m=m, f=f, rows=rows, tiles=2 * f // rows, chunks=chunks, depth=depth, trigger=depth,
    )  # fmt: skip
    w = c.matrix("w_gate", "w_up", dtype="bf16", layout="pairs")
    wide = 4 if chunks <= 4 else 8
    kernel = f"expert_few_bf16_up_{wide}_{most}"
    why = f"tiles of {rows} rows through {depth} stages"
    boxes = [_boxes(w, s["N"] * 2 * f, m, (COLUMNS // BOX, rows))]
    if shared:
        w = c.matrix("shared_gate", "shared_up", dtype="bf16", layout="pairs")
        boxes.append(_boxes(w, shared * 2 * f, m, (COLUMNS // BOX, rows)))
    grid, held = (info.num_sms, 1, 1), depth * (stage + 16) + rest
    c.launch(kernel, grid, THREADS, [boxes[0], boxes[-1], route, args], held, why=why)

    rows, rest = down_rows(m, info), PARTIAL + listed
    each = next(n for n in range(MOST_BOXES, 0, -1) if f // BOX % n == 0)
    stage = rows * each * BOX * 2
    depth = (room - rest) // (stage + 16)
    args = struct(
        EXPERTS_DOWN, x=residual, out=out, act=act, norm=c.vector("next_norm"),
        normed=c.address("normed") if folds else None, squares=c.address("squares") if folds else None,
        tokens=tokens, shared=shared, m=m, f=f, rows=rows, boxes=each, chunks=f // BOX // each, depth=depth,
        trigger=depth,
    )  # fmt: skip
    why = f"tiles of {rows} rows through {depth} stages"
    boxes = [_boxes(c.matrix("w_down", dtype="bf16"), s["N"] * m, f, (each, rows))]
    if shared:
        boxes.append(_boxes(c.matrix("shared_down", dtype="bf16"), m, shared * f, (each, rows)))
    grid, held = (min(m // rows, info.num_sms), 1, 1), depth * (stage + 16) + rest
    c.launch(f"expert_few_bf16_down_{most}", grid, THREADS, [boxes[0], boxes[-1], route, args], held, why=why)


def even_rows(rows: int, info: DeviceInfo) -> int:
    """Rows of a tile, 16 or 8: 8 where the busiest block then has over 5 % fewer rows."""
    waste = {each: blocks(rows // each, info.num_sms) * each for each in (16, 8)}
    return 8 if waste[8] < 0.95 * waste[16] else 16


def down_rows(m: int, info: DeviceInfo) -> int:
    """Rows of a tile of the down projections. The kernel leaves one sum of squares for each tile."""
    return even_rows(m, info)


def _boxes(w: Place, rows: int, columns: int, box: tuple[int, int]) -> Boxes:
    """A matrix seen as [columns / 64, rows, 64], so that one copy brings several boxes of 64 columns."""
    row = 2 * columns
    return Boxes(w, (columns // BOX, rows, BOX), (2 * BOX, row), "bf16", (*box, BOX), promotion=256)
