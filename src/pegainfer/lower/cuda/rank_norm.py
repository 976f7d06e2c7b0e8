"""A sum over ranks and the beginning of the norm behind it in one launch."""

from __future__ import annotations

from pegainfer.lower.cuda.linear import SCALED, gemm_choice
from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.lower.cuda.plan import CONTROL, Place, struct
from pegainfer.lower.cuda.ranks import THREADS, WIDTH, tagged_norm_most
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, with_op
from pegainfer.lower.cuda.skinny import MAX_TOKENS, SkinnyChoice
from pegainfer.ops.fused_norm import REDUCE_RESIDUAL_NORM
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.arguments import SUM_NORM


def _fold(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    add, after = calls[:2]
    x, norm = after.tensors["x"], after.tensors["norm"]
    sizes = add.sizes(step.env)
    if step.target.ranks == 1 or x.storage is not add.tensors["x"].storage:
        return "several ranks, and a norm of the same x"
    if x.dtype != "bf16" or norm.kind is not Kind.WEIGHT or sizes["N"] % WIDTH:
        return f"activations of bf16, whole groups of {WIDTH} and a norm whose weight is constant"
    if not 0 < sizes["T"] <= MAX_TOKENS or 4 * sizes["T"] * sizes["N"] > tagged_norm_most(step.target.ranks):
        return "few bytes"
    if not isinstance(gemm_choice(after, after.sizes(step.env), step.target), SkinnyChoice):
        return "a GEMM by Hopper's kernels behind the norm"
    normed = temporaries.tensor("normed residual", *x.shape, dtype=x.dtype)
    parts = blocks(sizes["N"], THREADS * WIDTH)
    squares = temporaries.tensor("squares of the summed residual", parts, MAX_TOKENS, dtype="f32")
    operands = with_op(add, norm=norm, normed=normed, squares=squares)
    first = OpCall.of(REDUCE_RESIDUAL_NORM, {"part": THREADS * WIDTH}, **operands)
    operands = with_op(after, x=normed, squares=squares)
    del operands["norm"]
    return [first, OpCall.of(SCALED[after.spec.name], after.attrs, **operands)]


NORM_AFTER_SUM = Rule("norm_after_sum", (frozenset({"reduce_residual"}), frozenset(SCALED)), _fold)


@handles("reduce_residual_norm")
def _reduce_residual_norm(c: LoweringContext) -> None:
    s = c.sizes
    args = struct(
        SUM_NORM, x=c.address("x"), partial=c.address("partial"), control=Place(CONTROL),
        norm=c.vector("norm"), normed=c.address("normed"), squares=c.address("squares"), n=s["N"],
    )  # fmt: skip
    grid = (blocks(s["N"], THREADS * WIDTH), s["T"], 1)
    c.launch("sum_ranks_norm_bf16", grid, THREADS, [args], why="few bytes, and the norm behind the sum")
