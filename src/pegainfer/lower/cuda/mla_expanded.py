"""Attention over expanded latents on Hopper: keys and values of each head for rows of many query tokens.

Which rows are served so is decided on the device (sm90/mla/plan.cu), because only the bounds of a step are
known here. Keys of all such rows are expanded into a scratch of bounded size, in several rounds of launches
if necessary; rows for which the rounds have no room are left to absorbed attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from pegainfer.lower.cuda.attention_choice import ITEM_BYTES, PLAN_BYTES, AttentionProblem
from pegainfer.lower.cuda.gemm import SIXTEEN
from pegainfer.lower.cuda.lowering import LoweringContext, blocks
from pegainfer.lower.cuda.plan import Boxes, Place, PlannedArg, struct
from pegainfer.lower.cuda.target import Target
from pegainfer.runtime.cuda.arguments import ATTENTION, ATTENTION_MERGE, MLA_EXPAND, MLA_EXPAND_PLAN
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.tensor import item_bytes

# As in common/attention/attention.cuh, sm90/mla/plan.cu and sm90/mla/expand.cuh: tokens of a tile of queries
# and of keys; parts that fill the device; channels of a head's keys and of its values; rotated channels that
# all heads share; tokens of a page.
TILE, PREFILL_BLOCKS, CHANNELS, ROTATED, PAGE = 128, 256, 128, 64, 16
RANK, HEAD = 512, CHANNELS + ROTATED
LEAST_TOKENS = 64  # query tokens from which on a row is expanded
SCRATCH_BYTES = 256 << 20  # most bytes of expanded keys and values
# Most rounds of a step; plan.cu has room for 8. A round is launched even where a step has no keys for it,
# which costs a few microseconds a layer.
ROUNDS = 4


@dataclass(frozen=True)
class ExpandedChoice:
    """Room for rows that are attended over expanded latents.

    Args:
        least: query tokens of a row from which on it is expanded.
        tiles: of 128 keys that a round expands.
        rounds: launches that follow each other.
        slots: tiles of 128 queries whose sums are kept.
        items: room of a round's work list.
    """

    least: int
    tiles: int
    rounds: int
    slots: int
    items: int


def key_bytes(heads: int) -> int:
    """Bytes of one token, expanded."""
    return 2 * (heads * 2 * CHANNELS + ROTATED)


def serves(dtype: str, key: int, value: int, rank: int, width: int) -> bool:
    """Whether the kernels are compiled for these channels: of keys without the shared ones, and of values."""
    return dtype in SIXTEEN and (key, value, rank, width) == (CHANNELS, CHANNELS, RANK, RANK + ROTATED)


@lru_cache(maxsize=1024)
def choose_expanded(
    p: AttentionProblem, target: Target, least: int, scratch_bytes: int
) -> ExpandedChoice | None:
    """None where no row of the step has so many tokens, or the card has no kernel.

    Args:
        least: query tokens of a row from which on it is expanded.
        scratch_bytes: of expanded keys and values, at most.
    """
    if target.info.arch != "90a" or p.decode_only or p.tokens < least:
        return None
    longest = max(p.table_width * p.block_size, p.tokens)
    most = scratch_bytes // (TILE * key_bytes(p.heads))
    rows = min(p.rows, p.tokens // least)
    tiles = min(most, rows * blocks(p.table_width * p.block_size, TILE))
    rounds = min(ROUNDS, blocks(longest, tiles * TILE))
    # A row that takes several rounds fills one at least, so there are no more such rows than rounds.
    resumed = blocks(p.tokens, TILE) + rounds if rounds > 1 else 0
    slots = max(2 * PREFILL_BLOCKS // p.heads, resumed)
    return ExpandedChoice(least, tiles, rounds, slots, blocks(p.tokens, TILE) + rows + slots)


@dataclass(frozen=True)
class ExpandedPlan:
    """The work list of a step.

    Args:
        rest: each row's query tokens that are left to absorbed attention.
        absorbed: a range of tokens that contains all of these.
    """

    plans: Place
    items: Place
    merges: Place
    sources: Place
    rest: Place
    absorbed: Place


def plan_expanded(c: LoweringContext, p: AttentionProblem, choice: ExpandedChoice) -> ExpandedPlan:
    """The work list, made ahead of everything else; layers share it."""
    rows = [c.call.tensors[n].storage for n in ("query_starts", "query_lens", "context_lens")]
    key = ("expanded plan", *(t.name for t in rows), p.heads)
    sizes = (
        PLAN_BYTES * choice.rounds, ITEM_BYTES * choice.rounds * choice.items, ITEM_BYTES * choice.slots,
        8 * choice.rounds * choice.tiles, 4 * p.rows, 8,
    )  # fmt: skip
    ends = list(accumulate((aligned(n) for n in sizes), initial=0))
    start = c.step_memory("/".join(map(str, key)), ends[-1])
    plan = ExpandedPlan(*(start + at for at in ends[:-1]))
    query_starts, query_lens, context_lens = map(Place, rows)
    args = struct(
        MLA_EXPAND_PLAN, plans=plan.plans, items=plan.items, merges=plan.merges, sources=plan.sources,
        rest=plan.rest, absorbed=plan.absorbed, query_starts=query_starts, query_lens=query_lens,
        context_lens=context_lens, rows=p.rows, heads=p.heads, rounds=choice.rounds, tiles=choice.tiles,
        slots=choice.slots, item_room=choice.items, least=choice.least,
    )  # fmt: skip
    c.launch_ahead("mla_expand_plan", (1, 1, 1), 256, [args], "rows over expanded latents, in all layers")
    return plan


def attend_expanded(
    c: LoweringContext, p: AttentionProblem, choice: ExpandedChoice, plan: ExpandedPlan, layer: Place,
    page_stride: int,
) -> None:  # fmt: skip
    """Launches the rounds, then the kernel that adds up the parts of rows that were cut.

    Args:
        layer: address of the layer's part of block 0.
        page_stride: elements from a block to the next.
    """
    item, width = item_bytes(p.dtype), key_bytes(p.heads)
    expanded = c.scratch(choice.tiles * TILE * width)
    sums = c.scratch(choice.slots * p.heads * TILE * CHANNELS * 4)
    heads = c.scratch(choice.slots * p.heads * TILE * 8)
    q_width = p.heads * HEAD
    queries = Boxes(c.address("q"), (p.tokens, q_width), (q_width * item,), p.dtype, (TILE, 64))
    keys = Boxes(expanded, (choice.tiles * TILE, width // item), (width,), p.dtype, (TILE, 64))
    names = ("query_starts", "query_lens", "context_lens", "block_table")
    for number in range(choice.rounds):
        counts = plan.plans + PLAN_BYTES * number
        args = struct(
            MLA_EXPAND, out=expanded, kv=layer, block_table=c.address("block_table"),
            context_lens=c.address("context_lens"), plan=counts,
            sources=plan.sources + 8 * choice.tiles * number, page_stride=page_stride, h=p.heads,
            block_size=p.block_size, table_width=p.table_width,
        )  # fmt: skip
        _launch(c, f"mla_expand_{p.dtype}", [*_latent_boxes(c, p, layer), args])
        args = struct(
            ATTENTION, out=c.address("out"), q=None, kv=None, **{n: c.address(n) for n in names},
            plan=counts, items=plan.items + ITEM_BYTES * choice.items * number, firsts=None, sums=sums,
            heads=heads, page_stride=0, h=p.heads, g=p.heads, block_size=p.block_size,
            table_width=p.table_width, scale_log2=c.call.attrs["scale"] * math.log2(math.e), v_scale=1.0,
        )  # fmt: skip
        _launch(c, f"mla_attend_expanded_{p.dtype}", [queries, keys, args])
    args = struct(
        ATTENTION_MERGE, out=c.address("out"), plan=plan.plans, cuts=None, merges=plan.merges, sums=sums,
        heads=heads, h=p.heads, g=p.heads, tile_rows=TILE,
    )  # fmt: skip
    merge, grid = f"attention_merge_prefill_{p.dtype}_d{CHANNELS}", (2 * c.target.info.num_sms, 1, 1)
    c.launch(merge, grid, CHANNELS, [args], why="adds up parts of expanded tiles")


def _latent_boxes(c: LoweringContext, p: AttentionProblem, layer: Place) -> list[Boxes]:
    """Pages of latents, and both matrices of the heads."""
    s, item = c.sizes, item_bytes(p.dtype)
    rows = (s["N"] * s["Y"] - int(c.call.attrs["layer"])) * s["S"]
    w_k, w_v = (c.matrix(name, dtype=p.dtype) for name in ("w_k", "w_v"))
    return [
        Boxes(layer, (rows, RANK + ROTATED), ((RANK + ROTATED) * item,), p.dtype, (PAGE, 64)),
        Boxes(w_k, (p.heads * RANK, CHANNELS), (CHANNELS * item,), p.dtype, (64, 64)),
        Boxes(w_v, (p.heads * CHANNELS, RANK), (RANK * item,), p.dtype, (CHANNELS, 64)),
    ]


def _launch(c: LoweringContext, kernel: str, args: Sequence[PlannedArg]) -> None:
    threads, shared = (c.target.feature(kernel, name) or 0 for name in ("block", "shared"))
    c.launch(kernel, (c.target.info.num_sms, 1, 1), threads, args, shared, why="one block on each SM")
