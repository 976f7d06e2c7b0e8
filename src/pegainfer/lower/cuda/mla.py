"""Lowering of latent attention (MLA): a matrix for each head, the cached row, attention over rows."""

from __future__ import annotations

import math
from functools import lru_cache

from pegainfer.lower.cuda import mla_expanded
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
from pegainfer.lower.cuda.gemm import SIXTEEN, project
from pegainfer.lower.cuda.linear import gemm_problem
from pegainfer.lower.cuda.lowering import LoweringContext, Operands, blocks, handles
from pegainfer.lower.cuda.mla_expanded import attend_expanded, choose_expanded, plan_expanded, serves
from pegainfer.lower.cuda.plan import Place, Struct, ptr, struct
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.arguments import ATTENTION, HEAD_LINEAR, LATENT_APPEND
from pegainfer.runtime.cuda.launch import i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

# As in common/mla/latent.cuh: channels of a cached row and of its values; heads of a decoding block.
WIDTH, RANK, DECODE_HEADS = 576, 512, 16
ANY_WIDTH = 1024  # most channels that latent_any.cu takes
# Kernels of latent attention by the shared memory of a block: for decoded rows, and for prefilled ones.
TILES = ((227 << 10, "r16_k64_s3", "r64_k64_s2"), (163 << 10, "r16_k64_s2", "r64_k32_s2"))
SMALL_TILE = "r16_k32_s2"
HEAD_TOKENS = (16, 64, 128)  # that head_linear.cu is compiled for
# Flags of latent.cuh. EARLY: keys were cached before the launch ahead of this one began.
PREFILL, EARLY = 1, 2


# A matrix for each head


@handles("head_linear")
def _head_linear(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.one_dtype("a", "out")
    w = c.matrix("w", dtype=dtype)
    head_linear(c, c.address("out"), c.address("a"), w, dtype, s["N"], s["K"], s["B"] - s["K"])


def head_linear(
    c: LoweringContext, out: Place, a: Place, w: Place, dtype: str, n: int, k: int, copied: int,
    wanted: Place | None = None,
) -> None:  # fmt: skip
    """out[t, h] = a[t, h, :k] · w[h]ᵀ, and `copied` channels behind it, of the call's tokens and heads.

    Args:
        wanted: where the range of tokens lies that need it; all if None.
    """
    tokens, heads = c.sizes["T"], c.sizes["H"]
    if not tokens:
        return
    args = struct(
        HEAD_LINEAR, out=out, a=a, w=w, tokens=tokens, h=heads, n=n, k=k, a_width=k + copied,
        out_width=n + copied, range=wanted,
    )  # fmt: skip
    if dtype not in SIXTEEN or n % 8 or k % 8 or copied % 8:
        why = "float32, or sizes that are no multiples of 8"
        grid = (blocks(tokens * heads * (n + copied), 8), 1, 1)
        c.launch(f"head_linear_any_{dtype}", grid, 256, [args], why=why)
        return
    most = sum(tokens > tile for tile in HEAD_TOKENS[:-1])  # of a larger tile, half would be empty
    for tile in reversed(HEAD_TOKENS[: most + 1]):
        kernel = f"head_linear_{dtype}_t{tile}"
        rows, threads, shared = (c.target.feature(kernel, name) or 0 for name in ("rows", "block", "shared"))
        grid = (blocks(n, rows), blocks(tokens, tile), heads)
        # Smaller tiles read more, but too few blocks leave SMs without work.
        if grid[0] * grid[1] * heads > c.target.info.num_sms // 2:
            break
    c.launch(kernel, grid, threads, [args], shared, why=f"tiles of {tile} tokens")


# Rotation and append


@handles("rope_tail")
def _rope_tail(c: LoweringContext) -> None:
    s = c.sizes
    heads = s["T"] * s["H"]
    args = [
        ptr(c.address("x")), ptr(c.address("positions")), ptr(c.vector("cos_sin")), i64(heads), i32(s["H"]),
        i32(s["D"]), i32(s["B"]),
    ]  # fmt: skip
    c.launch(f"rope_tail_{c.dtype('x')}", (blocks(heads, 8), 1, 1), 256, args)


@handles("latent_append")
def _latent_append(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.one_dtype("latent", "kv")
    args = _append_args(c, c.address("latent"), s["D"], "norm", None, 0)
    c.launch(f"latent_append_{dtype}", (blocks(s["T"], 8), 1, 1), 256, [args])


def _append_args(
    c: LoweringContext, latent: Place, stride: int, norm: str, q: Place | None, head_dim: int
) -> Struct:
    """`stride`: elements from a token of latent to the next. Without q only latents are cached."""
    s = c.sizes
    eps = c.call.attrs["eps" if q is None else "latent_eps"]
    return struct(
        LATENT_APPEND, kv=_layer(c), q=q, latent=latent, norm=c.vector(norm),
        positions=c.address("positions"), slots=c.address("slots"), cos_sin=c.vector("cos_sin"),
        stride=stride, page_stride=_page_stride(c), tokens=s["T"], h=s["H"] if q else 0, head_dim=head_dim,
        rank=s["K"], rotated=s["B"], block_size=s["S"], eps=eps,
    )  # fmt: skip


def _one_projection(call: OpCall) -> bool:
    """Whether one GEMM of 16 bits may leave queries and latents side by side."""
    x, q, kv = (call.tensors[name] for name in ("x", "q", "kv"))
    widths = (x.shape[1], call.tensors["wq"].shape[0], call.tensors["w_latent"].shape[0])
    aligned = all(isinstance(n, int) and n % 8 == 0 for n in widths)
    return "wq_down" not in call.tensors and x.dtype in SIXTEEN and q.dtype == kv.dtype == x.dtype and aligned


@handles("mla_qkv_append", whole=_one_projection)
def _mla_qkv(c: LoweringContext) -> None:
    """One GEMM, and one launch that rotates the queries and caches the latents."""
    s, dtype = c.sizes, c.dtype("x")
    problem = gemm_problem(c.call, s, c.target)
    projected = c.scratch(s["T"] * problem.n * item_bytes(dtype))
    project(
        c, problem, projected, c.address("x"), c.matrix("wq", "w_latent", dtype=dtype),
        norm=c.vector("norm"), eps=c.call.attrs["eps"],
    )  # fmt: skip
    latent = projected + s["A"] * item_bytes(dtype)
    args = _append_args(c, latent, problem.n, "latent_norm", c.address("q"), s["F"])
    c.launch(f"mla_finish_{dtype}", (blocks(s["T"] * (s["H"] + 1), 8), 1, 1), 256, [args])


# Attention


def latent_refusal(p: AttentionProblem, rank: int) -> tuple[str, str] | None:
    """(required, offered) where no kernel serves the problem."""
    if p.dtype not in (*SIXTEEN, "f32"):
        return "a cache of bf16, f16 or f32", p.dtype
    if p.head_dim > ANY_WIDTH:
        return f"cached rows of at most {ANY_WIDTH} numbers", str(p.head_dim)
    if _tiled(p, rank) and p.block_size % PAGE:
        return f"blocks of a multiple of {PAGE} tokens", str(p.block_size)
    return None


def _tiled(p: AttentionProblem, rank: int) -> bool:
    """Whether the tensor core kernels are compiled for these sizes."""
    return p.dtype in SIXTEEN and (p.head_dim, rank) == (WIDTH, RANK)


@lru_cache(maxsize=1024)
def choose_latent(p: AttentionProblem, target: Target) -> AttentionChoice:
    """This GPU's tensor core kernels for rows of 512 + 64 numbers in 16 bits."""
    tiles = next((t[1:] for t in TILES if target.info.max_shared >= t[0]), (SMALL_TILE, SMALL_TILE))
    decode, prefill = (f"latent_attention_{p.dtype}_{tile}" for tile in tiles)
    units = blocks(p.heads, DECODE_HEADS)
    shares = target.info.num_sms // units if p.rows > OWN_PARTS_ROWS else 0
    items, slots = decode_room(p, shares, p.table_width * p.block_size)
    tile_rows = target.feature(prefill, "rows") or 0
    most = 0 if p.decode_only else (blocks(p.tokens * p.heads, tile_rows) + p.rows) * PREFILL_PARTS
    return AttentionChoice(
        decode, "" if p.decode_only else prefill, tile_rows, items, most, slots,
        0 if p.decode_only else PREFILL_SLOTS, shares, row=False, append=False,
    )  # fmt: skip


@handles("latent_attention")
def _latent_attention(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.one_dtype("kv", "q", "out")
    p = _problem(c)
    if (wrong := latent_refusal(p, s["K"])) is not None:
        raise c.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    if _tiled(p, s["K"]):
        _attend(c, p, c.address("out"), c.address("q"), 0)
        return
    args = _args(c, p, c.address("out"), c.address("q"))
    c.launch(
        f"latent_attention_any_{dtype}", (p.heads, p.tokens, 1), 32,
        [args, i32(p.rows), i32(s["D"]), i32(s["K"])],
        why=f"float32, or rows of other than {RANK} + {WIDTH - RANK} numbers",
    )  # fmt: skip


def _absorbs(call: OpCall) -> bool:
    """Whether the kernels of 16 bits take queries, rows and values of these sizes."""
    q, kv, out, w_k = (call.tensors[name] for name in ("q", "kv", "out", "w_k"))
    widths = (q.shape[2], out.shape[2], w_k.shape[2])
    aligned = all(isinstance(n, int) and n % 8 == 0 for n in widths)
    sizes = (kv.shape[3], w_k.shape[1]) == (WIDTH, RANK) and isinstance(kv.shape[2], int)
    return kv.dtype in SIXTEEN and q.dtype == out.dtype == kv.dtype and aligned and sizes


@handles("mla_attention", whole=_absorbs)
def _mla_attention(c: LoweringContext) -> None:
    """Queries absorbed, attention, values. Attention copies keys while queries are being absorbed."""
    s, dtype = c.sizes, c.dtype("kv")
    p = _problem(c)
    if (wrong := latent_refusal(p, s["K"])) is not None:
        raise c.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    served = serves(dtype, s["X"], s["A"], s["K"], s["D"])
    bounds = mla_expanded.LEAST_TOKENS, mla_expanded.SCRATCH_BYTES
    expanded = choose_expanded(p, c.target, *bounds) if served else None
    rows = plan_expanded(c, p, expanded) if expanded else None
    absorbed, attended = (c.scratch(p.tokens * p.heads * n * item_bytes(dtype)) for n in (WIDTH, RANK))
    w_k, w_v = c.matrix("w_k", dtype=dtype), c.matrix("w_v", dtype=dtype)
    wanted, rest = (rows.absorbed, rows.rest) if rows else (None, None)
    head_linear(c, absorbed, c.address("q"), w_k, dtype, RANK, s["X"], WIDTH - RANK, wanted)
    _attend(c, p, attended, absorbed, EARLY, rest)
    head_linear(c, c.address("out"), attended, w_v, dtype, s["A"], RANK, 0, wanted)
    if expanded and rows:  # behind the others, whose last tiles of tokens may reach into these rows
        attend_expanded(c, p, expanded, rows, _layer(c), _page_stride(c))


def _problem(c: LoweringContext) -> AttentionProblem:
    s = c.sizes
    return AttentionProblem(
        s["T"], s["R"], s["H"], 1, s["D"], s["S"], s["W"], c.dtype("kv"), c.step.decode_only
    )  # fmt: skip


def _attend(
    c: LoweringContext, p: AttentionProblem, out: Place, q: Place, flags: int, lens: Place | None = None
) -> None:
    """Launches the tensor core kernels.

    Args:
        out: [T, H, 512].
        q: [T, H, 576].
        flags: EARLY or 0.
        lens: each row's query tokens; those of the call if None.
    """
    choice = choose_latent(p, c.target)
    plan = plan_rows(c, p, choice, lens)
    parts = choice.decode_slots * p.heads
    sums = c.scratch(parts * 4 * RANK), c.scratch(8 * parts)
    args = _args(c, p, out, q, plan, plan.decode, plan.firsts if choice.shares else None, sums)
    items = (choice.shares or choice.decode_items) * blocks(p.heads, DECODE_HEADS)
    _persistent(c, choice.decode, args, items, flags, choice.cut)
    if choice.decode_slots:
        cuts = min(p.rows, choice.shares) if choice.shares else p.rows
        merge = f"attention_merge_decode_{p.dtype}_d{RANK}"
        args = merge_args(c, p, choice, plan, sums, out)
        c.launch(merge, (p.heads, cuts, 1), RANK, [args], why="adds up parts of decoded rows")
    if not choice.prefill:
        return
    parts = choice.prefill_slots * choice.tile_rows
    sums = c.scratch(parts * 4 * RANK), c.scratch(8 * parts)
    args = _args(c, p, out, q, plan, plan.prefill, None, sums)
    _persistent(
        c, choice.prefill, args, choice.prefill_items, flags | PREFILL, f"tiles of {choice.tile_rows}"
    )
    merge, grid = f"attention_merge_prefill_{p.dtype}_d{RANK}", (2 * c.target.info.num_sms, 1, 1)
    args = merge_args(c, p, choice, plan, sums, out)
    c.launch(merge, grid, RANK, [args], why="adds up parts of prefilled tiles")


def _persistent(c: LoweringContext, kernel: str, args: Struct, most: int, flags: int, why: str) -> None:
    """One block on each SM, or as many as there can be items."""
    threads, shared = (c.target.feature(kernel, name) or 0 for name in ("block", "shared"))
    grid = (min(most, c.target.info.num_sms), 1, 1)
    c.launch(kernel, grid, threads, [args, i32(flags)], shared, why=why)


def _args(
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
        ATTENTION, out=out, q=q, kv=_layer(c), **{n: c.address(n) for n in names},
        plan=plan.counts if plan else None, items=items, firsts=firsts, sums=sums[0], heads=sums[1],
        page_stride=_page_stride(c), h=p.heads, g=1, block_size=p.block_size, table_width=p.table_width,
        scale_log2=c.call.attrs["scale"] * math.log2(math.e), v_scale=1.0,
    )  # fmt: skip


def _page_stride(c: Operands) -> int:
    """Elements from a block of latents to the next: all its layers lie together."""
    s = c.sizes
    return s["Y"] * s["S"] * s["D"]


def _layer(c: Operands) -> Place:
    """Address of the layer's part of block 0."""
    s = c.sizes
    return c.address("kv") + int(c.call.attrs["layer"]) * s["S"] * s["D"] * item_bytes(c.dtype("kv"))
