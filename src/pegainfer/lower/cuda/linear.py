"""Lowering of the ops that are one GEMM, and of a norm that is folded into the GEMM that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pegainfer.lower.cuda.fp8 import stays_fp8
from pegainfer.lower.cuda.gemm import SIXTEEN, GemmChoice, GemmProblem, choose_gemm, project
from pegainfer.lower.cuda.lora_layers import choose_with_adapters, project_with_adapters, same_factors
from pegainfer.lower.cuda.lowering import LoweringContext, Step, handles
from pegainfer.lower.cuda.packed import PackedChoice, form_of, linear_weight
from pegainfer.lower.cuda.ranks import shard_of
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, with_op
from pegainfer.lower.cuda.skinny import NextNorm, Scale, SkinnyChoice
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.fused_delta import SCALED_GATED_DELTA
from pegainfer.ops.fused_mla import SCALED_MLA_DECODE, SCALED_MLA_QKV_APPEND
from pegainfer.ops.fused_norm import (
    LINEAR_RESIDUAL_NORM,
    SCALED_GATE_UP_SWIGLU,
    SCALED_PROJECT_HEADS,
    SCALED_QKV_ROPE_APPEND,
)
from pegainfer.ops.lora_layers import ADAPTED, BASE
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.tensor import item_bytes

Sizes = Mapping[str, int]
Fields = tuple[int, int, int, str, bool]  # m, n, k, kind of output, norm
# The GEMM of each op that is one GEMM and what surrounds it.
PROBLEMS: dict[str, Callable[[Sizes], Fields]] = {
    "linear_residual": lambda s: (s["T"], s["N"], s["K"], "residual", False),
    "gate_up_swiglu": lambda s: (s["T"], 2 * s["F"], s["M"], "swiglu", True),
    "qkv_norm_rope_append": lambda s: (s["T"], s["A"] + 2 * s["B"], s["M"], "store", True),
    "gated_qkv_norm_rope_append": lambda s: (s["T"], 2 * s["A"] + 2 * s["B"], s["M"], "store", True),
    "project_heads": lambda s: (s["T"], s["E"] * s["D"], s["M"], "store", True),
    "mla_qkv_append": lambda s: (s["T"], s["A"] + s["D"], s["M"], "store", True),
    "mla_decode": lambda s: (s["T"], s["A"] + s["D"], s["M"], "store", True),
    "gated_delta": lambda s: (s["T"], s["F"] + s["A"] + 2 * s["H"], s["M"], "store", True),
    "lm_head": lambda s: (s["L"], s["V"], s["M"], "storef32", True),
}
# The weights that each of these GEMMs multiplies by, as one; those that a call lacks are left out.
WEIGHTS = {
    "linear": ("w",),
    "linear_residual": ("w",),
    "gate_up_swiglu": ("w_gate", "w_up"),
    "qkv_norm_rope_append": ("wq", "wk", "wv"),
    "gated_qkv_norm_rope_append": ("wq", "wk", "wv", "wg"),
    "project_heads": ("wq", "wk", "wv", "wg"),
    "mla_qkv_append": (),
    "mla_decode": (),
    "gated_delta": ("w_qkv", "w_z", "w_a", "w_b"),
    "lm_head": ("w",),
}
# Their weights are expanded: one GEMM takes them with the gates' narrow weights, which have no packed form.
UNPACKED = frozenset({"gated_delta"})
# Ops that begin with a norm of every row of x, and their forms that take what linear_residual_norm leaves.
SCALED = {
    "qkv_norm_rope_append": SCALED_QKV_ROPE_APPEND,
    "project_heads": SCALED_PROJECT_HEADS,
    "gate_up_swiglu": SCALED_GATE_UP_SWIGLU,
    "gated_delta": SCALED_GATED_DELTA,
    "mla_qkv_append": SCALED_MLA_QKV_APPEND,
    "mla_decode": SCALED_MLA_DECODE,
}
SCALED |= {ADAPTED[name].name: ADAPTED[spec.name] for name, spec in SCALED.items() if name in ADAPTED}
UNSCALED = {spec.name: name for name, spec in SCALED.items()} | {
    "linear_residual_norm": "linear_residual", "lora_linear_residual_norm": "lora_linear_residual"
}  # fmt: skip


def plain_name(call: OpCall) -> str:
    """The op whose GEMM the call has: without a folded norm and without adapters."""
    name = UNSCALED.get(call.spec.name, call.spec.name)
    return BASE.get(name, name)


def gemm_problem(call: OpCall, sizes: Sizes, target: Target) -> GemmProblem:
    """The GEMM of a call of one of PROBLEMS, or of its form with a folded norm."""
    name = plain_name(call)
    dtype = call.tensors["a" if "a" in call.tensors else "x"].dtype
    m, n, k, out, norm = PROBLEMS[name](sizes)
    form = None if name in UNPACKED else form_of(call, weights_of(call))
    weights = stays_fp8([call.tensors[w] for w in weights_of(call)], dtype, target)
    norm = norm and call.spec.name not in UNSCALED
    return GemmProblem(m, n, k, dtype, out, norm, weights, form.name if form else "")


def weights_of(call: OpCall) -> tuple[str, ...]:
    """The operands that the call's GEMM takes as one weight."""
    names = WEIGHTS[plain_name(call)]
    return tuple(name for name in names if name in call.tensors)


def matrices(call: OpCall) -> list[Tensor]:
    """The weights of a call of one GEMM; none of other ops."""
    return [call.tensors[w] for w in WEIGHTS.get(plain_name(call), ()) if w in call.tensors]


def gemm_choice(call: OpCall, sizes: Sizes, target: Target) -> GemmChoice | None:
    """The kernel of such a call's GEMM; None for one with adapters that are not computed inside of it."""
    problem = gemm_problem(call, sizes, target)
    if "adapters" in call.tensors:
        return choose_with_adapters(call, problem, sizes, target)
    return choose_gemm(problem, target)


# The norm folded into the GEMM that follows


def _fold(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    residual, after = calls[:2]
    x, norm = after.tensors["x"], after.tensors["norm"]
    if x.storage is not residual.tensors["x"].storage:
        return "a norm of the same x"
    if x.dtype != "bf16":  # in float16, x times a norm's weight, not yet scaled, could overflow
        return f"activations of bf16, not {x.dtype}"
    if norm.kind is not Kind.WEIGHT:
        return "a norm whose weight is constant"
    tokens = residual.sizes(step.env)["T"]
    if not tokens:
        return "tokens"
    choice, other = (gemm_choice(c, c.sizes(step.env), step.target) for c in (residual, after))
    fusing = (SkinnyChoice, PackedChoice)
    if not isinstance(choice, fusing) or not isinstance(other, fusing):
        return f"GEMMs by Hopper's kernels on both sides of the norm, or of packed weights, at {tokens} rows"
    if choice.most_tokens != other.most_tokens:
        return "kernels that take as many rows on both sides of the norm"
    width = x.shape[1]
    assert isinstance(width, int)
    normed = temporaries.tensor("normed residual", *x.shape, dtype=x.dtype)
    squares = temporaries.tensor(
        "squares of the residual", choice.square_groups(width), choice.most_tokens, dtype="f32"
    )
    first = OpCall.of(
        ADAPTED[LINEAR_RESIDUAL_NORM.name] if "adapters" in residual.tensors else LINEAR_RESIDUAL_NORM,
        {"tile": choice.rows},
        **with_op(residual, norm=norm, normed=normed, squares=squares),
    )
    operands = with_op(after, x=normed, squares=squares)
    del operands["norm"]
    return [first, OpCall.of(SCALED[after.spec.name], after.attrs, **operands)]


FOLD_NORM = Rule(
    "fold_norm", (frozenset({"linear_residual", "lora_linear_residual"}), frozenset(SCALED)), _fold
)


# Launches


def scale_of(c: LoweringContext) -> Scale | None:
    """How the sums of a call whose norm was folded are scaled."""
    if "squares" not in c.call.tensors:
        return None
    return Scale(c.address("squares"), int(c.call.tensors["squares"].shape[0]))


@handles("linear")
def _linear(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("a")
    out_dtype = c.dtype("out")
    if out_dtype not in (dtype, "f32"):
        raise c.refuse("dtype of out", f"{dtype} or f32", out_dtype)
    kind = "store" if out_dtype == dtype else "storef32"
    weights, form = stays_fp8(matrices(c.call), dtype, c.target), form_of(c.call, ("w",))
    problem = GemmProblem(
        s["T"], s["N"], s["K"], dtype, kind, weights=weights, form=form.name if form else ""
    )
    project(c, problem, c.address("out"), c.address("a"), linear_weight(c, "w"))


@handles("linear_residual", "linear_residual_norm", "lora_linear_residual_norm")
def _linear_residual(c: LoweringContext) -> None:
    dtype = c.dtype("a")
    if c.dtype("x") != dtype:
        raise c.refuse("dtype of x", dtype, c.dtype("x"))
    next_norm = None
    if "norm" in c.call.tensors:
        norm = c.vector("norm")
        assert norm is not None
        next_norm = NextNorm(norm, c.address("normed"), c.address("squares"))
    problem = gemm_problem(c.call, c.sizes, c.target)
    run = project_with_adapters if "adapters" in c.call.tensors else project
    run(c, problem, c.address("x"), c.address("a"), linear_weight(c, "w"), next_norm=next_norm)


def sixteen_bits(call: OpCall) -> bool:
    """Whether x has 16 bits and rows that the kernels with a norm inside take."""
    x = call.tensors["x"]
    return x.dtype in SIXTEEN and isinstance(x.shape[1], int) and x.shape[1] % 8 == 0


@handles("lora_linear_residual", whole=lambda call: call.tensors["x"].dtype in SIXTEEN and same_factors(call))
def _lora_linear_residual(c: LoweringContext) -> None:
    _linear_residual(c)


@handles(
    "lora_gate_up_swiglu", "lora_scaled_gate_up_swiglu", whole=lambda c: sixteen_bits(c) and same_factors(c)
)
def _lora_gate_up(c: LoweringContext) -> None:
    _gate_up(c)


@handles("gate_up_swiglu", "scaled_gate_up_swiglu", whole=sixteen_bits)
def _gate_up(c: LoweringContext) -> None:
    run = project_with_adapters if "adapters" in c.call.tensors else project
    run(
        c, gemm_problem(c.call, c.sizes, c.target), c.address("out"), c.address("x"),
        linear_weight(c, "w_gate", "w_up", layout="pairs"),
        norm=c.vector("norm"), eps=c.call.attrs["eps"], scale=scale_of(c),
    )  # fmt: skip


@handles("lm_head", whole=sixteen_bits)
def _lm_head(c: LoweringContext) -> None:
    """Of several ranks, each multiplies with its rows of the matrix. Its columns of the logits, [L, own], are
    what the sampler of several ranks takes."""
    s, dtype = c.sizes, c.dtype("x")
    problem = gemm_problem(c.call, s, c.target)
    own = shard_of(s["V"], c.target)
    if own is None:
        w = linear_weight(c, "w")
    else:  # a packed matrix is in tiles of several rows, so the ranks' shares are rows of the expanded one
        problem = replace(problem, n=len(own), weights="", form="")
        w = c.matrix("w", dtype=dtype) + own.start * s["M"] * item_bytes(dtype)
    project(
        c, problem, c.address("logits"), c.address("x"), w,
        norm=c.vector("norm"), rows=c.address("rows"), eps=c.call.attrs["eps"],
    )  # fmt: skip
