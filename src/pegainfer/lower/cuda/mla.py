"""Lowering of latent attention (MLA): a matrix for each head, the cached row, attention over rows."""

from __future__ import annotations

from pegainfer.lower.cuda import mla_expanded
from pegainfer.lower.cuda.attention_choice import AttentionProblem
from pegainfer.lower.cuda.gemm import SIXTEEN, project
from pegainfer.lower.cuda.latent import (
    EARLY,
    OLDER,
    RANK,
    WIDTH,
    LatentAttention,
    absorb,
    head_linear,
    latent_args,
    latent_layer,
    latent_refusal,
    latent_stride,
    tiled,
)
from pegainfer.lower.cuda.linear import gemm_problem, scale_of
from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.lower.cuda.mla_expanded import (
    CHANNELS,
    HEAD,
    attend_expanded,
    choose_expanded,
    plan_expanded,
    serves,
)
from pegainfer.lower.cuda.plan import Place, Struct, ptr, struct
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, lacks_own_heads
from pegainfer.ops.fused_mla import MLA_DECODE
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.arguments import LATENT_APPEND
from pegainfer.runtime.cuda.launch import i32, i64
from pegainfer.runtime.cuda.tensor import item_bytes

# A matrix for each head


@handles("head_linear")
def _head_linear(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.one_dtype("a", "out")
    w = c.matrix("w", dtype=dtype)
    head_linear(c, c.address("out"), c.address("a"), w, dtype, s["N"], s["K"], s["B"] - s["K"])


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
    eps = c.call.attrs.get("latent_eps", c.call.attrs["eps"])
    return struct(
        LATENT_APPEND, kv=latent_layer(c), q=q, latent=latent, norm=c.vector(norm),
        positions=c.address("positions"), slots=c.address("slots"), cos_sin=c.vector("cos_sin"),
        stride=stride, page_stride=latent_stride(c), tokens=s["T"], h=s["H"] if q else 0, head_dim=head_dim,
        rank=s["K"], rotated=s["B"], block_size=s["S"], eps=eps,
    )  # fmt: skip


def _one_projection(call: OpCall) -> bool:
    """Whether one GEMM of 16 bits may leave queries and latents side by side."""
    x, q, kv = (call.tensors[name] for name in ("x", "q", "kv"))
    widths = (x.shape[1], call.tensors["wq"].shape[0], call.tensors["w_latent"].shape[0])
    aligned = all(isinstance(n, int) and n % 8 == 0 for n in widths)
    return "wq_down" not in call.tensors and x.dtype in SIXTEEN and q.dtype == kv.dtype == x.dtype and aligned


@handles("mla_qkv_append", "scaled_mla_qkv_append", whole=_one_projection)
def _mla_qkv(c: LoweringContext) -> None:
    """One GEMM, and one launch that rotates the queries and caches the latents."""
    s, dtype = c.sizes, c.dtype("x")
    problem = gemm_problem(c.call, s, c.target)
    projected = c.scratch(s["T"] * problem.n * item_bytes(dtype))
    project(
        c, problem, projected, c.address("x"), c.matrix("wq", "w_latent", dtype=dtype),
        norm=c.vector("norm"), eps=c.call.attrs["eps"], scale=scale_of(c),
    )  # fmt: skip
    latent = projected + s["A"] * item_bytes(dtype)
    args = _append_args(c, latent, problem.n, "latent_norm", c.address("q"), s["F"])
    published = dtype in SIXTEEN and (s["K"], s["B"], s["F"]) == (RANK, WIDTH - RANK, HEAD)
    kernel = f"mla_finish_{dtype}{'_r512' if published else ''}"
    c.launch(kernel, (blocks(s["T"] * (s["H"] + 1), 8), 1, 1), 256, [args])


# Attention


@handles("latent_attention")
def _latent_attention(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.one_dtype("kv", "q", "out")
    p = _problem(c.call, c.step)
    if (wrong := latent_refusal(p, s["K"])) is not None:
        raise c.refuse("no kernel", *wrong)
    if p.tokens == 0 or p.rows == 0:
        return
    if tiled(p, s["K"]):
        LatentAttention(c, p, c.address("out"), c.address("q"), 0).launch()
        return
    args = latent_args(c, p, c.address("out"), c.address("q"))
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
    p = _problem(c.call, c.step)
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
    attention = LatentAttention(c, p, attended, absorbed, EARLY, rest)
    if p.decode_only:
        attention.launch_with_values(w_v, s["A"])
        return
    attention.launch()
    head_linear(c, c.address("out"), attended, w_v, dtype, s["A"], RANK, 0, wanted)
    if expanded and rows:  # last: tiles of the launches above may overwrite some of these rows' outputs
        attend_expanded(c, p, expanded, rows, latent_layer(c), latent_stride(c))


def _problem(call: OpCall, step: Step) -> AttentionProblem:
    s, dtype = call.sizes(step.env), call.tensors["kv"].dtype
    return AttentionProblem(s["T"], s["R"], s["H"], 1, s["D"], s["S"], s["W"], dtype, step.decode_only)


# Decoded tokens: queries go from their GEMM to absorption


def _join(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    qkv, attention = (call.tensors for call in calls[:2])
    if (lacking := lacks_own_heads(calls)) is not None:
        return lacking
    problem = _problem(calls[1], step)
    if not step.decode_only or problem.tokens > problem.rows:
        return "rows of one token each"
    s = calls[1].sizes(step.env)
    if not serves(problem.dtype, s["X"], s["A"], s["K"], s["D"]) or latent_refusal(problem, s["K"]):
        return f"heads of {HEAD} and values of {CHANNELS} channels over rows of {WIDTH} numbers in 16 bits"
    taken = {n: t for n, t in (attention | qkv).items() if n != "q"}
    return [OpCall.of(MLA_DECODE, {**calls[0].attrs, **calls[1].attrs}, **taken)]


JOIN_MLA = Rule("join_mla", (frozenset({"mla_qkv_append"}), frozenset({"mla_attention"})), _join)


@handles("mla_decode", "scaled_mla_decode")
def _mla_decode(c: LoweringContext) -> None:
    """Attention loads older keys while the newest are cached and queries absorbed."""
    s, dtype, p = c.sizes, c.dtype("kv"), _problem(c.call, c.step)
    if p.tokens == 0:
        return
    problem = gemm_problem(c.call, s, c.target)
    item = item_bytes(dtype)
    projected = c.scratch(p.tokens * problem.n * item)
    absorbed, attended = (c.scratch(p.tokens * p.heads * n * item) for n in (WIDTH, RANK))
    project(
        c, problem, projected, c.address("x"), c.matrix("wq", "w_latent", dtype=dtype),
        norm=c.vector("norm"), eps=c.call.attrs["eps"], scale=scale_of(c),
    )  # fmt: skip
    append = _append_args(c, projected + s["A"] * item, problem.n, "latent_norm", None, 0)
    absorb(c, absorbed, projected, append, dtype)
    LatentAttention(c, p, attended, absorbed, OLDER).launch_with_values(c.matrix("w_v", dtype=dtype), s["V"])
