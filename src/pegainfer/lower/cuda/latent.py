"""Attention over cached latents (MLA): kernels of a step and their launches; a matrix for each head."""

from __future__ import annotations

import math
from functools import lru_cache

from pegainfer.lower.cuda.attention import Plan, merge_args, plan_rows
from pegainfer.lower.cuda.attention_choice import (
    OWN_PARTS_ROWS,
    PAGE,
    PREFILL_PARTS,
    PREFILL_SLOTS,
    AttentionChoice,
    AttentionProblem,
    decode_room,
)
from pegainfer.lower.cuda.gemm import SIXTEEN
from pegainfer.lower.cuda.lowering import LoweringContext, Operands, blocks
from pegainfer.lower.cuda.plan import Place, PlannedArg, Struct, struct
from pegainfer.lower.cuda.target import Target
from pegainfer.runtime.cuda.arguments import ATTENTION, HEAD_LINEAR
from pegainfer.runtime.cuda.launch import i32
from pegainfer.runtime.cuda.tensor import item_bytes

# As in common/mla/latent.cuh: channels of a cached row and of its values; heads of a decoding block.
WIDTH, RANK, DECODE_HEADS = 576, 512, 16
ANY_WIDTH = 1024  # most channels that latent_any.cu takes
# Kernels of latent attention by the shared memory of a block: for decoded rows, and for prefilled ones.
TILES = ((227 << 10, "r16_k64_s3", "r64_k64_s2"), (163 << 10, "r16_k64_s2", "r64_k32_s2"))
SMALL_TILE = "r16_k32_s2"
# Keys of a decoded part of short rows: of rows in a batch, and of the only row of a step. In a batch, parts
# of 64 keys are slower: they are more blocks than the device runs at once, and twice as many sums to merge.
CHUNK, ALONE_CHUNK = 128, 64
HEAD_TOKENS = (16, 64, 128)  # that head_linear.cu is compiled for
# Flags of latent.cuh. EARLY: all keys were cached before the launch ahead of this one began. OLDER: all keys
# but each decoded row's newest were.
PREFILL, EARLY, OLDER = 1, 2, 4


# A matrix for each head


def head_linear(
    c: LoweringContext, out: Place, a: Place, w: Place, dtype: str, n: int, k: int, copied: int,
    wanted: Place | None = None,
) -> None:  # fmt: skip
    """out[t, h] = a[t, h, :k] · w[h]ᵀ for the call's tokens and heads; the next `copied` channels are copied.

    Args:
        wanted: device address of the range of tokens that need a result; None: all tokens do.
    """
    tokens, heads = c.sizes["T"], c.sizes["H"]
    if not tokens:
        return
    args = _head_args(c, out, a, w, n, k, copied, wanted)
    if dtype not in SIXTEEN or n % 8 or k % 8 or copied % 8:
        why = "float32, or sizes that are no multiples of 8"
        grid = (blocks(tokens * heads * (n + copied), 8), 1, 1)
        c.launch(f"head_linear_any_{dtype}", grid, 256, [args], why=why)
        return
    _launch_tiles(c, f"head_linear_{dtype}", n, heads, [args])


def absorb(c: LoweringContext, out: Place, projected: Place, append: Struct, dtype: str) -> None:
    """Rotates and absorbs the queries of decoded tokens and caches their latents, for the published sizes.

    Args:
        projected: queries and latents as their GEMM leaves them.
    """
    s = c.sizes
    w = c.matrix("w_k", dtype=dtype)
    args = _head_args(c, out, projected, w, s["K"], s["X"], s["B"], None)
    _launch_tiles(c, f"mla_absorb_{dtype}", s["K"], s["H"], [args, append], more=1)


def _launch_tiles(
    c: LoweringContext, prefix: str, n: int, heads: int, args: list[PlannedArg], more: int = 0
) -> None:
    """Launches the largest tile that leaves enough blocks. `more`: blocks along z behind the heads'."""
    tokens = c.sizes["T"]
    most = sum(tokens > tile for tile in HEAD_TOKENS[:-1])  # of a larger tile, half would be empty
    for tile in reversed(HEAD_TOKENS[: most + 1]):
        kernel = f"{prefix}_t{tile}"
        rows, threads, shared = (c.target.feature(kernel, name) or 0 for name in ("rows", "block", "shared"))
        grid = (blocks(n, rows), blocks(tokens, tile), heads + more)
        # Smaller tiles read more, but too few blocks leave SMs without work.
        if grid[0] * grid[1] * heads > c.target.info.num_sms // 2:
            break
    c.launch(kernel, grid, threads, args, shared, why=f"tiles of {tile} tokens")


def _head_args(
    c: LoweringContext, out: Place, a: Place, w: Place, n: int, k: int, copied: int, wanted: Place | None
) -> Struct:
    return struct(
        HEAD_LINEAR, out=out, a=a, w=w, tokens=c.sizes["T"], h=c.sizes["H"], n=n, k=k, a_width=k + copied,
        out_width=n + copied, range=wanted,
    )  # fmt: skip


# Attention


def latent_refusal(p: AttentionProblem, rank: int) -> tuple[str, str] | None:
    """(required, offered) where no kernel serves the problem."""
    if p.dtype not in (*SIXTEEN, "f32"):
        return "a cache of bf16, f16 or f32", p.dtype
    if p.head_dim > ANY_WIDTH:
        return f"cached rows of at most {ANY_WIDTH} numbers", str(p.head_dim)
    if tiled(p, rank) and p.block_size % PAGE:
        return f"blocks of a multiple of {PAGE} tokens", str(p.block_size)
    return None


def tiled(p: AttentionProblem, rank: int) -> bool:
    """Whether the tensor core kernels are compiled for these sizes."""
    return p.dtype in SIXTEEN and (p.head_dim, rank) == (WIDTH, RANK)


@lru_cache(maxsize=1024)
def choose_latent(p: AttentionProblem, target: Target, chunk: int, alone: int) -> AttentionChoice:
    """This GPU's tensor core kernels for rows of 512 + 64 numbers in 16 bits.

    Args:
        chunk: keys of a decoded part of short rows.
        alone: the same for the only row of a step.
    """
    tiles = next((t[1:] for t in TILES if target.info.max_shared >= t[0]), (SMALL_TILE, SMALL_TILE))
    decode, prefill = (f"latent_attention_{p.dtype}_{tile}" for tile in tiles)
    units = blocks(p.heads, DECODE_HEADS)
    shares = target.info.num_sms // units if p.rows > OWN_PARTS_ROWS else 0
    chunk = alone if p.rows == 1 else chunk
    items, slots = decode_room(p, shares, p.table_width * p.block_size, chunk)
    tile_rows = target.feature(prefill, "rows") or 0
    most = 0 if p.decode_only else (blocks(p.tokens * p.heads, tile_rows) + p.rows) * PREFILL_PARTS
    return AttentionChoice(
        decode, "" if p.decode_only else prefill, tile_rows, items, most, slots,
        0 if p.decode_only else PREFILL_SLOTS, shares, row=False, append=False, chunk=chunk,
    )  # fmt: skip


class LatentAttention:
    """The tensor core kernels of a call.

    Args:
        out: [T, H, 512].
        q: [T, H, 576].
        flags: EARLY, OLDER or 0.
        lens: each row's query tokens; those of the call if None.
    """

    def __init__(
        self, c: LoweringContext, p: AttentionProblem, out: Place, q: Place, flags: int,
        lens: Place | None = None,
    ) -> None:  # fmt: skip
        self.c, self.p, self.out, self.q, self.flags = c, p, out, q, flags
        self.choice = choose_latent(p, c.target, CHUNK, ALONE_CHUNK)
        self.plan = plan_rows(c, p, self.choice, lens)
        self.cuts = min(p.rows, self.choice.shares) if self.choice.shares else p.rows

    def launch(self) -> None:
        """Attention of all rows, with the merges of parts."""
        c, p, choice = self.c, self.p, self.choice
        sums = self.decode()
        if choice.decode_slots:
            merge = f"attention_merge_decode_{p.dtype}_d{RANK}"
            args = merge_args(c, p, choice, self.plan, sums, self.out)
            c.launch(merge, (p.heads, self.cuts, 1), RANK, [args], why="adds up parts of decoded rows")
        if choice.prefill:
            self._prefill()

    def launch_with_values(self, w_v: Place, n: int) -> None:
        """Attention of decoded rows, then n values of each head, which are the call's output."""
        c, p = self.c, self.p
        sums = self.decode()
        if not self.choice.decode_slots:
            head_linear(c, c.address("out"), self.out, w_v, p.dtype, n, RANK, 0)
            return
        kernel = f"latent_values_{p.dtype}"
        rows, tokens, threads, shared = (
            c.target.feature(kernel, name) or 0 for name in ("rows", "tokens", "block", "shared")
        )
        args = _head_args(c, c.address("out"), self.out, w_v, n, RANK, 0, None)
        merge = merge_args(c, p, self.choice, self.plan, sums, self.out)
        grid = (blocks(n, rows), blocks(p.tokens, tokens), p.heads)
        why = "adds up parts of decoded rows, then values"
        c.launch(kernel, grid, threads, [args, merge, i32(self.cuts)], shared, why=why)

    def decode(self) -> tuple[Place, Place]:
        """Attention of rows of one token. Returns where the sums of their parts are left."""
        c, p, choice, plan = self.c, self.p, self.choice, self.plan
        parts = choice.decode_slots * p.heads
        sums = c.scratch(parts * 4 * RANK), c.scratch(8 * parts)
        firsts = plan.firsts if choice.shares else None
        args = latent_args(c, p, self.out, self.q, plan, plan.decode, firsts, sums)
        items = (choice.shares or choice.decode_items) * blocks(p.heads, DECODE_HEADS)
        _persistent(c, choice.decode, args, items, self.flags, choice.cut)
        return sums

    def _prefill(self) -> None:
        c, p, choice, plan = self.c, self.p, self.choice, self.plan
        parts = choice.prefill_slots * choice.tile_rows
        sums = c.scratch(parts * 4 * RANK), c.scratch(8 * parts)
        args = latent_args(c, p, self.out, self.q, plan, plan.prefill, None, sums)
        why = f"tiles of {choice.tile_rows}"
        _persistent(c, choice.prefill, args, choice.prefill_items, self.flags | PREFILL, why)
        merge, grid = f"attention_merge_prefill_{p.dtype}_d{RANK}", (2 * c.target.info.num_sms, 1, 1)
        args = merge_args(c, p, choice, plan, sums, self.out)
        c.launch(merge, grid, RANK, [args], why="adds up parts of prefilled tiles")


def _persistent(c: LoweringContext, kernel: str, args: Struct, most: int, flags: int, why: str) -> None:
    """One block on each SM, or as many as there can be items."""
    threads, shared = (c.target.feature(kernel, name) or 0 for name in ("block", "shared"))
    grid = (min(most, c.target.info.num_sms), 1, 1)
    c.launch(kernel, grid, threads, [args, i32(flags)], shared, why=why)


def latent_args(
    c: LoweringContext,
    p: AttentionProblem,
    out: Place,
    q: Place,
    plan: Plan | None = None,
    items: Place | None = None,
    firsts: Place | None = None,
    sums: tuple[Place | None, Place | None] = (None, None),
) -> Struct:
    names = ("query_starts", "query_lens", "context_lens", "block_table")
    return struct(
        ATTENTION, out=out, q=q, kv=latent_layer(c), **{n: c.address(n) for n in names},
        plan=plan.counts if plan else None, items=items, firsts=firsts, sums=sums[0], heads=sums[1],
        page_stride=latent_stride(c), h=p.heads, g=1, block_size=p.block_size, table_width=p.table_width,
        scale_log2=c.call.attrs["scale"] * math.log2(math.e), v_scale=1.0,
    )  # fmt: skip


def latent_stride(c: Operands) -> int:
    """Elements from a block of latents to the next: all its layers lie together."""
    s = c.sizes
    return s["Y"] * s["S"] * s["D"]


def latent_layer(c: Operands) -> Place:
    """Address of the layer's part of block 0."""
    s = c.sizes
    return c.address("kv") + int(c.call.attrs["layer"]) * s["S"] * s["D"] * item_bytes(c.dtype("kv"))
