"""Paged attention: which rows are decoded, which prefilled, in how many parts; problem, choice and launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from pegainfer.kernels.cuda.context import ARRIVALS
from pegainfer.kernels.cuda.gemm import SIXTEEN
from pegainfer.kernels.cuda.pointwise import HEADS, layer_address, page_stride
from pegainfer.kernels.cuda.site import Site, blocks, handles
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.launch import Arg, active_clusters, f32, i32, i64, ptr, struct
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.tensor import item_bytes
from pegainfer.runtime.cuda.tma import TensorMap

# As in common/attention/attention.cuh.
DECODE_CHUNK, DECODE_PARTS, PREFILL_PARTS, ITEM_BYTES, PLAN_BYTES, CUT_BYTES = 128, 32, 16, 32, 16, 16
PAGE = 16  # tokens that a decoding warp takes at a time; a block is whole pages
TILE_HEADS = (64, 128)  # that sm90/attention/prefill.cuh is compiled for
PREFILL_SLOTS = 128  # parts of prefilled tiles that may wait for each other in a step
# Up to so many rows are cut by their own length: products of as many are the same bit by bit whoever shares
# the batch, and so is attention. More are cut into even shares (adr/0010).
OWN_PARTS_ROWS = 16
# On Hopper up to so many rows go to clusters: a step of four is slower than with a launch that merges,
# though by itself attention is quicker (docs/log.md).
CLUSTER_ROWS = 1
CLUSTER, CLUSTER_ONE, CLUSTER_TWO, CLUSTER_TURN, CLUSTER_TURNS = 8, 256, 512, 2048, 4  # as in attention.cuh


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

    @property
    def units(self) -> int:
        """Blocks that decode the same keys: each one KV head, and at most eight of its query heads."""
        return self.kv_heads * blocks(self.group, 8)


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
    shares: int  # groups of blocks that decode even shares of all keys; 0: rows are cut by their own length
    cluster: int  # blocks that share a decoded row; 0: a launch of its own adds up the parts

    @property
    def boxes(self) -> bool:
        """Whether prefill reads the cache through the tensor memory accelerator."""
        return "_tiles_" in self.prefill

    def __str__(self) -> str:
        prefill = f", {self.prefill} in tiles of {self.tile_rows}" if self.prefill else ""
        parts = f"{self.shares} even shares" if self.shares else f"parts of {DECODE_CHUNK} keys or more"
        parts = f"clusters of {self.cluster} blocks" if self.cluster else parts
        return f"{self.decode} in {parts}{prefill}"


def choose_attention(p: AttentionProblem, info: DeviceInfo, decode_per_sm: int = 1) -> AttentionChoice:
    """This GPU's tensor core kernels for 16-bit caches (`refusal` must be None).

    Args:
        decode_per_sm: blocks of the decoding kernel that fit an SM together.
    """
    longest = p.table_width * p.block_size
    shares = decode_per_sm * info.num_sms // p.units if p.rows > OWN_PARTS_ROWS else 0
    few = p.rows <= CLUSTER_ROWS and p.rows * p.units * CLUSTER <= ARRIVALS
    cluster = CLUSTER if info.arch == "90a" and few else 0
    items, slots = _decode_room(p, shares, cluster, longest)
    tile_rows = 64 if p.head_dim == 256 else 128
    tiles_kernel = info.arch == "90a" and p.head_dim in TILE_HEADS
    prefill = "attention_prefill_tiles" if tiles_kernel else "attention_prefill"
    tiles = blocks(p.tokens * p.group, tile_rows) + p.rows
    return AttentionChoice(
        decode_kernel(p, cluster),
        "" if p.decode_only else f"{prefill}_{p.dtype}_d{p.head_dim}",
        tile_rows,
        items,
        0 if p.decode_only else tiles * PREFILL_PARTS,
        slots,
        0 if p.decode_only else PREFILL_SLOTS,
        shares,
        cluster,
    )


def _decode_room(p: AttentionProblem, shares: int, cluster: int, longest: int) -> tuple[int, int]:
    """(items, parts whose sums are kept) of rows of up to `longest` keys."""
    if shares:
        return p.rows + shares, 2 * shares  # each end of a share cuts one row in two at the most
    if cluster:
        turns = min(CLUSTER_TURNS, blocks(longest, CLUSTER_TURN))
        each = 1 if longest <= CLUSTER_ONE else 2 if longest <= CLUSTER_TWO else turns * CLUSTER
        return p.rows * each, p.rows * turns if turns > 1 else 0
    parts = min(DECODE_PARTS, max(1, blocks(longest, DECODE_CHUNK)))
    return p.rows * parts, p.rows * parts if parts > 1 else 0


def decode_kernel(p: AttentionProblem, cluster: int = 0) -> str:
    return f"attention_decode_{'cluster_' if cluster else ''}{p.dtype}_d{p.head_dim}"


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
        args = _args(site, p, _Plan(0, 0, 0, 0, 0, 0), 0, (0, 0))
        site.launch("attention_plain_f32", (p.heads, p.tokens, 1), 32, [args, i32(p.rows), i32(p.head_dim)])
        return
    c = choose_attention(p, site.ctx.device.info, _per_sm(site, p, decode_kernel(p)))
    plan = _plan(site, p, c)
    _decode(site, p, c, plan)
    if c.prefill:
        heads = c.prefill_slots * p.kv_heads * c.tile_rows
        sums = site.scratch(heads * 4 * p.head_dim), site.scratch(8 * heads)
        args = _args(site, p, plan, plan.prefill, sums)
        given = [_boxes(site, p).arg(), args] if c.boxes else [args]
        _persistent(site, p, c.prefill, given, c.prefill_items * p.kv_heads)
        merge = f"attention_merge_prefill_{dtype}_d{p.head_dim}"
        grid = (2 * site.ctx.device.info.num_sms, 1, 1)
        site.launch(merge, grid, p.head_dim, [_merge_args(site, p, c, plan, sums)])


def _decode(site: Site, p: AttentionProblem, c: AttentionChoice, plan: _Plan) -> None:
    """Rows of one token."""
    heads = c.decode_slots * p.heads
    sums = site.scratch(heads * 4 * p.head_dim), site.scratch(8 * heads * max(1, c.cluster))
    args = _args(site, p, plan, plan.decode, sums, plan.firsts if c.shares else 0)
    if c.cluster:
        _clusters(site, p, c, [args, ptr(site.ctx.arrivals.address)])
        return
    _persistent(site, p, c.decode, [args], (c.shares or c.decode_items) * p.units)
    if c.decode_slots:
        merge = f"attention_merge_decode_{p.dtype}_d{p.head_dim}"
        cuts = min(p.rows, c.shares) if c.shares else p.rows
        site.launch(merge, (p.heads, cuts, 1), p.head_dim, [_merge_args(site, p, c, plan, sums)])


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
    key = ("attention plan", *rows, p.kv_heads, p.group, c.tile_rows, c.shares, c.cluster)
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
            i32(c.decode_slots), i32(c.prefill_slots), i32(c.shares), i32(c.cluster),
        )  # fmt: skip
        site.launch("attention_plan", (1, 1, 1), 256, [args], ahead=True)
    return plan


def _persistent(site: Site, p: AttentionProblem, kernel: str, args: list[Arg], most: int) -> None:
    """As many blocks as fit the device at once, or as there can be items."""
    threads, shared = _block(site, p, kernel)
    grid = min(most, _per_sm(site, p, kernel) * site.ctx.device.info.num_sms)
    site.launch(kernel, (grid, 1, 1), threads, args, shared)


def _clusters(site: Site, p: AttentionProblem, c: AttentionChoice, args: list[Arg]) -> None:
    """Decoding by as many clusters as fit the device at once, or as there can be turns of rows."""
    threads, shared = _block(site, p, c.decode)
    outputs = min(8, p.group) * p.head_dim * 4
    shared += outputs + min(8, p.group) * CLUSTER * 16  # what the other blocks send
    fit = active_clusters(site.ctx.library.kernel(c.decode), CLUSTER, threads, shared)
    count = min(blocks(c.decode_items, CLUSTER) * p.units, fit)
    site.launch(c.decode, (count * CLUSTER, 1, 1), threads, args, shared, cluster=CLUSTER)


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


def _merge_args(
    site: Site, p: AttentionProblem, c: AttentionChoice, plan: _Plan, sums: tuple[int, int]
) -> Arg:
    return struct(
        ptr(site.address("out")), ptr(plan.counts), ptr(plan.cuts), ptr(plan.merges), *map(ptr, sums),
        i32(p.heads), i32(p.kv_heads), i32(c.tile_rows),
    )  # fmt: skip
