"""Paged attention's launches: which rows are decoded, which prefilled, in how many parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from pegainfer.kernels.cuda.attention_choice import (
    CLUSTER,
    CUT_BYTES,
    ITEM_BYTES,
    PAGE,
    PLAN_BYTES,
    ROW_CLUSTER_KEYS,
    AttentionChoice,
    AttentionProblem,
    choose_attention,
    decode_kernel,
    may_append,
    refusal,
)
from pegainfer.kernels.cuda.pointwise import layer_address, page_stride
from pegainfer.kernels.cuda.site import ProjectedHeads, Site, handles
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.launch import Arg, active_clusters, f32, i32, i64, ptr, struct
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.tensor import item_bytes
from pegainfer.runtime.cuda.tma import TensorMap


def _problem(site: Site, call: OpCall) -> AttentionProblem:
    s, dtype = call.sizes(site.env), call.tensors["kv"].dtype
    return AttentionProblem(
        s["T"], s["R"], s["H"], s["G"], s["D"], s["S"], s["W"], dtype, site.decode_only
    )  # fmt: skip


def finishes_heads(site: Site, call: OpCall) -> bool:
    """Whether this attention takes ProjectedHeads: its launch then appends k and v too."""
    dtype = call.tensors["kv"].dtype
    same = call.tensors["q"].dtype == call.tensors["out"].dtype == dtype
    return same and may_append(_problem(site, call), site.ctx.device.info)


@handles("attention")
def _attention(site: Site) -> None:
    p, dtype = _problem(site, site.this), site.dtype("kv")
    if site.dtype("q") != dtype or site.dtype("out") != dtype:
        raise site.refuse("dtypes of q and out", f"the cache's, {dtype}", site.dtype("q"))
    if (wrong := refusal(p)) is not None:
        raise site.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    if dtype == "f32":
        args = _args(site, p, _Plan(0, 0, 0, 0, 0, 0), 0, (0, 0))
        site.launch("attention_plain_f32", (p.heads, p.tokens, 1), 32, [args, i32(p.rows), i32(p.head_dim)])
        return
    heads = site.handed if isinstance(site.handed, ProjectedHeads) else None
    append = heads is not None
    per_sm = _per_sm(site, p, decode_kernel(p, append=append))
    c = choose_attention(p, site.ctx.device.info, per_sm, append)
    plan = _plan(site, p, c) if c.prefill or not c.row else _Plan(0, 0, 0, 0, 0, 0)
    if c.row:
        _row(site, p, c, heads)
    else:
        _decode(site, p, c, plan, heads)
    if c.prefill:
        parts = c.prefill_slots * p.kv_heads * c.tile_rows
        sums = site.scratch(parts * 4 * p.head_dim), site.scratch(8 * parts)
        args = _args(site, p, plan, plan.prefill, sums)
        given = [_boxes(site, p).arg(), args] if c.boxes else [args]
        _persistent(site, p, c.prefill, given, c.prefill_items * p.kv_heads)
        merge = f"attention_merge_prefill_{dtype}_d{p.head_dim}"
        grid = (2 * site.ctx.device.info.num_sms, 1, 1)
        site.launch(merge, grid, p.head_dim, [_merge_args(site, p, c, plan, sums)])


def _decode(
    site: Site, p: AttentionProblem, c: AttentionChoice, plan: _Plan, heads: ProjectedHeads | None
) -> None:
    """Rows of one token."""
    parts = c.decode_slots * p.heads
    sums = site.scratch(parts * 4 * p.head_dim), site.scratch(8 * parts)
    args = [_args(site, p, plan, plan.decode, sums, plan.firsts if c.shares else 0)]
    if heads is not None:
        args.append(_projected(site, heads))
    _persistent(site, p, c.decode, args, (c.shares or c.decode_items) * p.units)
    if c.decode_slots:
        merge = f"attention_merge_decode_{p.dtype}_d{p.head_dim}"
        cuts = min(p.rows, c.shares) if c.shares else p.rows
        site.launch(merge, (p.heads, cuts, 1), p.head_dim, [_merge_args(site, p, c, plan, sums)])


def _row(site: Site, p: AttentionProblem, c: AttentionChoice, heads: ProjectedHeads | None) -> None:
    """The only row, if it has one token, by one block on as many SMs as clusters of such blocks fill."""
    threads, shared = _block(site, p, c.decode)
    kernel, info = site.ctx.library.kernel(c.decode), site.ctx.device.info
    fit = active_clusters(kernel, CLUSTER, threads, info.max_shared)
    grid = CLUSTER * max(p.units, fit)
    parts = grid // p.units * p.heads
    sums = site.scratch(parts * 4 * p.head_dim), site.scratch(8 * parts)
    args = [_boxes(site, p).arg(), _args(site, p, _Plan(0, 0, 0, 0, 0, 0), 0, sums)]
    if heads is not None:
        args.append(_projected(site, heads))
    args.append(struct(ptr(site.ctx.arrivals.address), i32(ROW_CLUSTER_KEYS)))
    site.launch(c.decode, (grid, 1, 1), threads, args, shared, cluster=CLUSTER)


@dataclass(frozen=True)
class _Plan:
    """Addresses of a step's work list."""

    counts: int
    cuts: int
    firsts: int
    decode: int
    prefill: int
    merges: int


def _plan(site: Site, p: AttentionProblem, c: AttentionChoice) -> _Plan:
    """The step's work list, made by the first layer that needs it ahead of everything else."""
    rows = tuple(site.address(n) for n in ("query_starts", "query_lens", "context_lens"))
    key = ("attention plan", *rows, p.kv_heads, p.group, c.tile_rows, c.shares)
    sizes = (
        PLAN_BYTES, CUT_BYTES * p.rows, 4 * (c.shares + 1), ITEM_BYTES * c.decode_items,
        ITEM_BYTES * c.prefill_items, ITEM_BYTES * c.prefill_slots,
    )  # fmt: skip
    ends = list(accumulate((aligned(n) for n in sizes), initial=0))
    fresh = key not in site.shared
    if fresh:
        site.shared[key] = site.memory.kept("/".join(map(str, key)), ends[-1])
    plan = _Plan(*(site.shared[key] + at for at in ends[:-1]))
    if fresh:
        args = struct(
            ptr(plan.counts), ptr(plan.cuts), ptr(plan.firsts), ptr(plan.merges), ptr(plan.decode),
            ptr(plan.prefill), *map(ptr, rows), i32(p.rows), i32(p.group), i32(p.kv_heads), i32(c.tile_rows),
            i32(c.decode_slots), i32(c.prefill_slots), i32(c.shares),
        )  # fmt: skip
        site.launch("attention_plan", (1, 1, 1), 256, [args], ahead=True)
    return plan


def _persistent(site: Site, p: AttentionProblem, kernel: str, args: list[Arg], most: int) -> None:
    """As many blocks as fit the device at once, or as there can be items."""
    threads, shared = _block(site, p, kernel)
    grid = min(most, _per_sm(site, p, kernel) * site.ctx.device.info.num_sms)
    site.launch(kernel, (grid, 1, 1), threads, args, shared)


def _block(site: Site, p: AttentionProblem, kernel: str) -> tuple[int, int]:
    """(threads, bytes of shared memory) of a block."""
    variant = site.ctx.library.variant(kernel)
    assert variant is not None
    threads = int(variant.features["block"])
    if "ring" not in variant.features:
        return threads, int(variant.features["shared"])
    # Decode: behind the ring, each streaming warp's outputs.
    outputs = (threads // 32 - 1) * min(8, p.group) * p.head_dim * 4
    return threads, int(variant.features["ring"]) + outputs


def _per_sm(site: Site, p: AttentionProblem, kernel: str) -> int:
    """Blocks that an SM runs together."""
    return site.ctx.library.kernel(kernel).blocks_per_sm(*_block(site, p, kernel))


def _boxes(site: Site, p: AttentionProblem) -> TensorMap:
    """The layer's keys and values, 16 tokens of a head at a time.

    A box lies in shared memory as [tokens / 8][D / 64][8][64], which is what wgmma reads; a head's pages of
    all blocks, layers and kinds follow each other in memory.
    """
    s, item = site.sizes(), item_bytes(p.dtype)
    heads = (s["N"] * s["Y"] - int(site.this.attrs["layer"])) * 2 * p.kv_heads
    row = p.head_dim * item
    return TensorMap.of(
        layer_address(site),
        (heads, p.block_size // 8, p.head_dim // 64, 8, 64),
        (p.block_size * row, 8 * row, 64 * item, row),
        p.dtype,
        (1, PAGE // 8, p.head_dim // 64, 8, 64),
    )


def _args(
    site: Site, p: AttentionProblem, plan: _Plan, items: int, sums: tuple[int, int], firsts: int = 0
) -> Arg:
    names = ("query_starts", "query_lens", "context_lens", "block_table")
    return struct(
        ptr(site.address("out")), ptr(site.address("q")), ptr(layer_address(site)),
        *(ptr(site.address(n)) for n in names), ptr(plan.counts), ptr(items), ptr(firsts),
        *map(ptr, sums), i64(page_stride(site)), i32(p.heads), i32(p.kv_heads), i32(p.block_size),
        i32(p.table_width), f32(site.this.attrs["scale"] * math.log2(math.e)),
    )  # fmt: skip


def _projected(site: Site, heads: ProjectedHeads) -> Arg:
    return struct(
        ptr(heads.address), ptr(layer_address(site)), ptr(heads.q_norm), ptr(heads.k_norm),
        ptr(heads.positions), ptr(heads.slots), ptr(heads.cos_sin), f32(heads.eps),
    )  # fmt: skip


def _merge_args(
    site: Site, p: AttentionProblem, c: AttentionChoice, plan: _Plan, sums: tuple[int, int]
) -> Arg:
    return struct(
        ptr(site.address("out")), ptr(plan.counts), ptr(plan.cuts), ptr(plan.merges), *map(ptr, sums),
        i32(p.heads), i32(p.kv_heads), i32(c.tile_rows),
    )  # fmt: skip
