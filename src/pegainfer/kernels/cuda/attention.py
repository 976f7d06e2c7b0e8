"""Paged attention: which rows are decoded, which prefilled, in how many parts; problem, choice and launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from pegainfer.kernels.cuda.gemm import SIXTEEN
from pegainfer.kernels.cuda.pointwise import HEADS, layer_address, page_stride
from pegainfer.kernels.cuda.site import Site, blocks, handles
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import Arg, f32, i32, i64, ptr, struct
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.tensor import item_bytes
from pegainfer.runtime.cuda.tma import TensorMap

# As in common/attention/attention.cuh.
DECODE_CHUNK, DECODE_PARTS, PREFILL_PARTS, ITEM_BYTES, PLAN_BYTES = 128, 32, 16, 32, 16
PAGE = 16  # tokens that a decoding warp takes at a time; a block is whole pages
TILE_HEADS = (64, 128)  # that sm90/attention/prefill.cuh is compiled for
PREFILL_SLOTS = 128  # parts of prefilled tiles that may wait for each other in a step


@dataclass(frozen=True)
class AttentionProblem:
    """One layer's attention in a step of given greatest sizes."""

    tokens: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    table_width: int  # blocks a row
    dtype: str
    decode_only: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class AttentionChoice:
    """Kernels and room for a problem. `decode_slots`, `prefill_slots`: parts whose sums are kept."""

    decode: str
    prefill: str  # '' if no row can have several query tokens
    tile_rows: int  # (token, head) pairs of a prefill tile
    decode_items: int
    prefill_items: int
    decode_slots: int
    prefill_slots: int

    @property
    def boxes(self) -> bool:
        """Whether prefill reads the cache through the tensor memory accelerator."""
        return "_tiles_" in self.prefill

    def __str__(self) -> str:
        prefill = f", {self.prefill} in tiles of {self.tile_rows}" if self.prefill else ""
        return f"{self.decode} in parts of {DECODE_CHUNK} keys or more{prefill}"


def choose_attention(p: AttentionProblem, info: DeviceInfo) -> AttentionChoice:
    """This GPU's tensor core kernels for 16-bit caches (`refusal` must be None)."""
    parts = min(DECODE_PARTS, max(1, blocks(p.table_width * p.block_size, DECODE_CHUNK)))
    tile_rows = 64 if p.head_dim == 256 else 128
    tiles_kernel = info.arch == "90a" and p.head_dim in TILE_HEADS
    prefill = "attention_prefill_tiles" if tiles_kernel else "attention_prefill"
    tiles = blocks(p.tokens * p.group, tile_rows) + p.rows
    return AttentionChoice(
        f"attention_decode_{p.dtype}_d{p.head_dim}",
        "" if p.decode_only else f"{prefill}_{p.dtype}_d{p.head_dim}",
        tile_rows,
        p.rows * parts,
        0 if p.decode_only else tiles * PREFILL_PARTS,
        p.rows * parts if parts > 1 else 0,
        0 if p.decode_only else PREFILL_SLOTS,
    )


def refusal(p: AttentionProblem) -> tuple[str, str] | None:
    """(required, offered) where no kernel serves the problem."""
    if p.dtype not in (*SIXTEEN, "f32"):
        return "a cache of bf16, f16 or f32", p.dtype
    if p.dtype in SIXTEEN and p.head_dim not in HEADS:
        return f"heads of {', '.join(map(str, HEADS))}", str(p.head_dim)
    if p.head_dim > 256:
        return "heads of at most 256", str(p.head_dim)
    if p.block_size % PAGE:
        return f"blocks of a multiple of {PAGE} tokens", str(p.block_size)
    return None


@handles("attention")
def _attention(site: Site) -> None:
    s, dtype = site.sizes(), site.dtype("kv")
    p = AttentionProblem(
        s["T"], s["R"], s["H"], s["G"], s["D"], s["S"], s["W"], dtype, site.decode_only
    )  # fmt: skip
    if site.dtype("q") != dtype or site.dtype("out") != dtype:
        raise site.refuse("dtypes of q and out", f"the cache's, {dtype}", site.dtype("q"))
    if (wrong := refusal(p)) is not None:
        raise site.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    if dtype == "f32":
        args = _args(site, p, _Plan(0, 0, 0, 0, 0), 0, (0, 0))
        site.launch("attention_plain_f32", (p.heads, p.tokens, 1), 32, [args, i32(p.rows), i32(p.head_dim)])
        return
    c = choose_attention(p, site.ctx.device.info)
    plan = _plan(site, p, c)
    units = p.kv_heads * blocks(p.group, 8)
    heads = c.decode_slots * p.heads
    sums = site.scratch(heads * 4 * p.head_dim), site.scratch(8 * heads)
    args = _args(site, p, plan, plan.decode, sums)
    _persistent(site, p, c.decode, [args], c.decode_items * units)
    if c.decode_slots:
        merge = f"attention_merge_decode_{dtype}_d{p.head_dim}"
        site.launch(merge, (p.heads, p.rows, 1), p.head_dim, [_merge_args(site, p, c, plan, sums)])
    if c.prefill:
        heads = c.prefill_slots * p.kv_heads * c.tile_rows
        sums = site.scratch(heads * 4 * p.head_dim), site.scratch(8 * heads)
        args = _args(site, p, plan, plan.prefill, sums)
        given = [_boxes(site, p).arg(), args] if c.boxes else [args]
        _persistent(site, p, c.prefill, given, c.prefill_items * p.kv_heads)
        merge = f"attention_merge_prefill_{dtype}_d{p.head_dim}"
        grid = (2 * site.ctx.device.info.num_sms, 1, 1)
        site.launch(merge, grid, p.head_dim, [_merge_args(site, p, c, plan, sums)])


@dataclass(frozen=True)
class _Plan:
    """Addresses of a step's work list."""

    counts: int
    row_parts: int
    decode: int
    prefill: int
    merges: int


def _plan(site: Site, p: AttentionProblem, c: AttentionChoice) -> _Plan:
    """The step's work list, made by the first layer that needs it ahead of everything else."""
    rows = tuple(site.address(n) for n in ("query_starts", "query_lens", "context_lens"))
    key = ("attention plan", *rows, p.kv_heads, p.group, c.tile_rows)
    sizes = (
        PLAN_BYTES, 8 * p.rows, ITEM_BYTES * c.decode_items, ITEM_BYTES * c.prefill_items,
        ITEM_BYTES * c.prefill_slots,
    )  # fmt: skip
    ends = list(accumulate((aligned(n) for n in sizes), initial=0))
    fresh = key not in site.shared
    if fresh:
        site.shared[key] = site.memory.kept("/".join(map(str, key)), ends[-1])
    plan = _Plan(*(site.shared[key] + at for at in ends[:-1]))
    if fresh:
        args = struct(
            ptr(plan.counts), ptr(plan.row_parts), ptr(plan.merges), ptr(plan.decode), ptr(plan.prefill),
            *map(ptr, rows), i32(p.rows), i32(p.group), i32(p.kv_heads), i32(c.tile_rows),
            i32(c.decode_slots), i32(c.prefill_slots),
        )  # fmt: skip
        site.launch("attention_plan", (1, 1, 1), 256, [args], ahead=True)
    return plan


def _persistent(site: Site, p: AttentionProblem, kernel: str, args: list[Arg], most: int) -> None:
    """As many blocks as fit the device at once, or as there can be items."""
    variant = site.ctx.library.variant(kernel)
    assert variant is not None
    threads = int(variant.features["block"])
    if "ring" in variant.features:  # decode: behind the ring, each streaming warp's outputs
        outputs = (threads // 32 - 1) * min(8, p.group) * p.head_dim * 4
        shared = int(variant.features["ring"]) + outputs
    else:
        shared = int(variant.features["shared"])
    per_sm = site.ctx.library.kernel(kernel).blocks_per_sm(threads, shared)
    grid = min(most, per_sm * site.ctx.device.info.num_sms)
    site.launch(kernel, (grid, 1, 1), threads, args, shared)


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


def _args(site: Site, p: AttentionProblem, plan: _Plan, items: int, sums: tuple[int, int]) -> Arg:
    names = ("query_starts", "query_lens", "context_lens", "block_table")
    return struct(
        ptr(site.address("out")), ptr(site.address("q")), ptr(layer_address(site)),
        *(ptr(site.address(n)) for n in names), ptr(plan.counts), ptr(items), *map(ptr, sums),
        i64(page_stride(site)), i32(p.heads), i32(p.kv_heads), i32(p.block_size), i32(p.table_width),
        f32(site.this.attrs["scale"] * math.log2(math.e)),
    )  # fmt: skip


def _merge_args(
    site: Site, p: AttentionProblem, c: AttentionChoice, plan: _Plan, sums: tuple[int, int]
) -> Arg:
    return struct(
        ptr(site.address("out")), ptr(plan.counts), ptr(plan.row_parts), ptr(site.address("query_starts")),
        ptr(plan.merges), *map(ptr, sums), i32(p.heads), i32(p.kv_heads), i32(c.tile_rows),
    )  # fmt: skip
