"""Paged attention's launches: which rows are decoded, which prefilled, in how many parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pegainfer.lower.cuda.attention_choice import (
    CUT_BYTES,
    ITEM_BYTES,
    PAGE,
    PLAN_BYTES,
    AttentionChoice,
    AttentionProblem,
    block_of,
    choose_attention,
    fit_sm,
    refusal,
)
from pegainfer.lower.cuda.lowering import LoweringContext, Step, handles
from pegainfer.lower.cuda.plan import ARRIVALS, Boxes, Place, PlannedArg, Struct, struct
from pegainfer.lower.cuda.pointwise import inverse_scales, layer_address, page_stride
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.arguments import (
    ATTENTION,
    ATTENTION_MERGE,
    ATTENTION_PLAN,
    ATTENTION_ROW,
    PROJECTED,
)
from pegainfer.runtime.cuda.device import CLUSTER
from pegainfer.runtime.cuda.launch import i32
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.tensor import item_bytes


def attention_problem(call: OpCall, step: Step) -> AttentionProblem:
    s, dtype = call.sizes(step.env), call.tensors["kv"].dtype
    return AttentionProblem(
        s["T"], s["R"], s["H"], s["G"], s["D"], s["S"], s["W"], dtype, step.decode_only
    )  # fmt: skip


@handles("attention", "append_attention")
def _attention(c: LoweringContext) -> None:
    p = attention_problem(c.call, c.step)
    dtype = p.activation
    append = "heads" in c.call.tensors
    q = "heads" if append else "q"
    if c.dtype(q) != dtype or c.dtype("out") != dtype:
        raise c.refuse(f"dtypes of {q} and out", f"{dtype}, beside a cache of {p.dtype}", c.dtype(q))
    if (wrong := refusal(p)) is not None:
        raise c.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    if dtype == "f32":
        args = _args(c, p, None, None, (None, None))
        c.launch(
            "attention_plain_f32", (p.heads, p.tokens, 1), 32, [args, i32(p.rows), i32(p.head_dim)],
            why="a cache of f32",
        )  # fmt: skip
        return
    choice = choose_attention(p, c.target, append)
    plan = plan_rows(c, p, choice) if choice.prefill or not choice.row else None
    if choice.row:
        _row(c, p, choice)
    else:
        assert plan is not None
        _decode(c, p, choice, plan)
    if choice.prefill:
        assert plan is not None
        parts = choice.prefill_slots * p.kv_heads * choice.tile_rows
        sums = c.scratch(parts * 4 * p.head_dim), c.scratch(8 * parts)
        args = _args(c, p, plan, plan.prefill, sums)
        given: list[PlannedArg] = [_boxes(c, p), args] if choice.boxes else [args]
        _persistent(
            c, p, choice.prefill, given, choice.prefill_items * p.kv_heads, f"tiles of {choice.tile_rows}"
        )
        merge = f"attention_merge_prefill_{dtype}_d{p.head_dim}"
        grid = (2 * c.target.info.num_sms, 1, 1)
        args = merge_args(c, p, choice, plan, sums)
        c.launch(merge, grid, p.head_dim, [args], why="adds up parts of prefilled tiles")


def _decode(c: LoweringContext, p: AttentionProblem, choice: AttentionChoice, plan: Plan) -> None:
    """Rows of one token."""
    parts = choice.decode_slots * p.heads
    sums = c.scratch(parts * 4 * p.head_dim), c.scratch(8 * parts)
    args: list[PlannedArg] = [_args(c, p, plan, plan.decode, sums, plan.firsts if choice.shares else None)]
    if choice.append:
        args.append(_projected(c))
    items = (choice.shares or choice.decode_items) * p.units
    _persistent(c, p, choice.decode, args, items, choice.cut)
    if choice.decode_slots:
        merge = f"attention_merge_decode_{p.activation}_d{p.head_dim}"
        cuts = min(p.rows, choice.shares) if choice.shares else p.rows
        args = [merge_args(c, p, choice, plan, sums)]
        c.launch(merge, (p.heads, cuts, 1), p.head_dim, args, why="adds up parts of decoded rows")


def _row(c: LoweringContext, p: AttentionProblem, choice: AttentionChoice) -> None:
    """The only row, if it has one token, by one block on as many SMs as clusters of such blocks fill."""
    threads, shared = block_of(p, c.target, choice.decode)
    grid = CLUSTER * max(p.units, c.target.info.clusters)
    parts = grid // p.units * p.heads
    sums = c.scratch(parts * 4 * p.head_dim), c.scratch(8 * parts)
    args: list[PlannedArg] = [_boxes(c, p), _args(c, p, None, None, sums)]
    if choice.append:
        args.append(_projected(c))
    keys = int(c.target.tuning.numbers(c.target.info, "attention")["row_cluster_keys"])
    args.append(struct(ATTENTION_ROW, arrivals=Place(ARRIVALS), cluster_keys=keys))
    c.launch(choice.decode, (grid, 1, 1), threads, args, shared, why=choice.cut, cluster=CLUSTER)


@dataclass(frozen=True)
class Plan:
    """A step's work list."""

    counts: Place
    cuts: Place
    firsts: Place
    decode: Place
    prefill: Place
    merges: Place


def plan_rows(
    c: LoweringContext, p: AttentionProblem, choice: AttentionChoice, lens: Place | None = None
) -> Plan:
    """The step's work list, made ahead of everything else; layers that need the same list share it.

    Args:
        lens: each row's query tokens, made ahead of the step; the call's input if None.
    """
    rows = [c.call.tensors[n].storage for n in ("query_starts", "query_lens", "context_lens")]
    key = (
        "attention plan", *(t.name for t in rows), p.kv_heads, p.group, choice.tile_rows, choice.shares,
        choice.chunk, *(["rest"] if lens else []),
    )  # fmt: skip
    sizes = (
        PLAN_BYTES, CUT_BYTES * p.rows, 4 * (choice.shares + 1), ITEM_BYTES * choice.decode_items,
        ITEM_BYTES * choice.prefill_items, ITEM_BYTES * choice.prefill_slots,
    )  # fmt: skip
    ends = list(accumulate((aligned(n) for n in sizes), initial=0))
    start = c.step_memory("/".join(map(str, key)), ends[-1])
    plan = Plan(*(start + at for at in ends[:-1]))
    query_starts, query_lens, context_lens = map(Place, rows)
    args = struct(
        ATTENTION_PLAN, plan=plan.counts, cuts=plan.cuts, firsts=plan.firsts, merges=plan.merges,
        decode=plan.decode, prefill=plan.prefill, query_starts=query_starts, query_lens=lens or query_lens,
        context_lens=context_lens, rows=p.rows, group=p.group, kv_heads=p.kv_heads,
        tile_rows=choice.tile_rows, decode_slots=choice.decode_slots, prefill_slots=choice.prefill_slots,
        shares=choice.shares, chunk=choice.chunk,
    )  # fmt: skip
    c.launch_ahead("attention_plan", (1, 1, 1), 256, [args], "the work list of attention in all layers")
    return plan


def _persistent(
    c: LoweringContext,
    p: AttentionProblem,
    kernel: str,
    args: Sequence[PlannedArg],
    most: int,
    why: str,
) -> None:
    """As many blocks as fit the device at once, or as there can be items."""
    threads, shared = block_of(p, c.target, kernel)
    grid = min(most, fit_sm(p, c.target, kernel) * c.target.info.num_sms)
    c.launch(kernel, (grid, 1, 1), threads, args, shared, why=why)


def _boxes(c: LoweringContext, p: AttentionProblem) -> Boxes:
    """The layer's keys and values, 16 tokens of a head at a time.

    A box lies in shared memory as [tokens / 8][D / 64][8][64], which is what wgmma reads; a head's pages of
    all blocks, layers and kinds follow each other in memory.
    """
    s, item = c.sizes, item_bytes(p.dtype)
    heads = (s["N"] * s["Y"] - int(c.call.attrs["layer"])) * 2 * p.kv_heads
    row = p.head_dim * item
    return Boxes(
        layer_address(c),
        (heads, p.block_size // 8, p.head_dim // 64, 8, 64),
        (p.block_size * row, 8 * row, 64 * item, row),
        p.dtype,
        (1, PAGE // 8, p.head_dim // 64, 8, 64),
    )


def _args(
    c: LoweringContext,
    p: AttentionProblem,
    plan: Plan | None,
    items: Place | None,
    sums: tuple[Place | None, Place | None],
    firsts: Place | None = None,
) -> Struct:
    names = ("query_starts", "query_lens", "context_lens", "block_table")
    # Decoding that finishes the heads takes q from them, not from here.
    q, attrs = None if "heads" in c.call.tensors else c.address("q"), c.call.attrs
    return struct(
        ATTENTION, out=c.address("out"), q=q, kv=layer_address(c), **{n: c.address(n) for n in names},
        plan=plan.counts if plan else None, items=items, firsts=firsts, sums=sums[0], heads=sums[1],
        page_stride=page_stride(c), h=p.heads, g=p.kv_heads, block_size=p.block_size,
        table_width=p.table_width, scale_log2=attrs["scale"] * attrs["k_scale"] * math.log2(math.e),
        v_scale=attrs["v_scale"],
    )  # fmt: skip


def _projected(c: LoweringContext) -> Struct:
    k_inverse, v_inverse = inverse_scales(c)
    return struct(
        PROJECTED, qkv=c.address("heads"), kv=layer_address(c), q_norm=c.vector("q_norm"),
        k_norm=c.vector("k_norm"), positions=c.address("positions"), slots=c.address("slots"),
        cos_sin=c.vector("cos_sin"), width=c.sizes["E"], eps=c.call.attrs["eps"],
        k_inverse=k_inverse, v_inverse=v_inverse,
    )  # fmt: skip


def merge_args(
    c: LoweringContext,
    p: AttentionProblem,
    choice: AttentionChoice,
    plan: Plan,
    sums: tuple[Place, Place],
    out: Place | None = None,
) -> Struct:
    """`out`: where the sums go; the call's output if None."""
    return struct(
        ATTENTION_MERGE, out=out or c.address("out"), plan=plan.counts, cuts=plan.cuts, merges=plan.merges,
        sums=sums[0], heads=sums[1], h=p.heads, g=p.kv_heads, tile_rows=choice.tile_rows,
    )  # fmt: skip
