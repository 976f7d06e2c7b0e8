"""Layers with adapters: the GEMM's own launch adds them where it has few rows, else two launches after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pegainfer.lower.cuda.gemm import GemmProblem, project, rms_norm, silu
from pegainfer.lower.cuda.lora import LoraProblem, expand, factor, shrink
from pegainfer.lower.cuda.lowering import LoweringContext
from pegainfer.lower.cuda.plan import ARRIVALS, Place, Struct, struct
from pegainfer.lower.cuda.skinny import NextNorm, Scale, SkinnyChoice, choose_skinny, skinny
from pegainfer.lower.cuda.target import SYSTEM, Target
from pegainfer.ops.lora_layers import weight_operands
from pegainfer.ops.program import OpCall
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.lora_arguments import LORA_FUSED, MAX_FACTORS
from pegainfer.runtime.cuda.tensor import item_bytes

# As sm90/gemm/lora.cuh has them.
CHANNELS, WARPS = 16, 2
GREATEST_RANK = 128
MOST_SLICES, LEAST_COLUMNS = 32, 128  # of k; columns that a slice has at least
GATHERED = 512  # most sums that a block adds up for a channel: tokens times slices


def matrices_with_adapters(call: OpCall) -> tuple[str, ...]:
    """The operands that adapters add to, in the order in which their GEMM has them as one matrix."""
    return tuple(o.name for o in weight_operands(call.spec) if o.name in call.tensors)


def same_factors(call: OpCall) -> bool:
    """Whether the factors have the dtype of the activations, as the kernels need it."""
    names = [f"{part}_{w}" for w in matrices_with_adapters(call) for part in ("down", "up")]
    return all(call.tensors[name].dtype == call.tensors["x"].dtype for name in names)


def _shared_bytes(tokens: int, factors: int, room: int) -> int:
    """Shared memory of lora::Adapters: its Lists, then h in 16 bits."""
    lists = tokens * (4 * -(-tokens // 32) + 8 + 4 + 2 + 4) + 8
    return -(-lists // 16) * 16 + 2 * factors * tokens * room


def _room(most: int) -> int:
    return -(-most // CHANNELS) * CHANNELS


def choose_with_adapters(
    call: OpCall, p: GemmProblem, sizes: Mapping[str, int], target: Target
) -> SkinnyChoice | None:
    """The GEMM's launch that also adds the adapters; None where no kernel does."""
    names = matrices_with_adapters(call)
    rows = [call.tensors[name].shape[0] for name in names]
    most = sizes["W"]
    if p.dtype != "bf16" or p.form or p.weights or not p.m:
        return None
    if len(names) > MAX_FACTORS or most > GREATEST_RANK or any(n % 2 for n in rows if isinstance(n, int)):
        return None
    shared = partial(_shared_bytes, factors=len(names), room=_room(most))
    c = choose_skinny(p.dtype, p.m, p.n, p.k, p.out, target, adapters=shared)
    return c if c is not None and _at_once(c, target.info) else None


def _at_once(c: SkinnyChoice, info: DeviceInfo) -> bool:
    """Whether all blocks run at once, for they wait for each other.

    Clusters cannot fill every SM with one block each, so a launch with clusters needs SMs that have room for
    two blocks.
    """
    per_sm = 2 if c.shared <= info.shared_per_sm // 2 - SYSTEM else 1
    return (
        c.groups * c.splits <= info.num_sms * (per_sm if c.splits > 1 else 1)
        and c.splits <= 4 * (per_sm - 1) + 1
    )


def project_with_adapters(
    c: LoweringContext,
    p: GemmProblem,
    out: Place,
    x: Place,
    w: Place,
    *,
    norm: Place | None = None,
    eps: float = 0.0,
    scale: Scale | None = None,
    next_norm: NextNorm | None = None,
) -> None:
    """Lowers one GEMM and its adapters; arguments as of `project`. `scale` and `next_norm` need a choice."""
    if p.m == 0:
        return
    choice = choose_with_adapters(c.call, p, c.sizes, c.target)
    p, x = normalised(c, p, x, norm, eps)
    if choice is not None:
        skinny(
            c, choice, p.out, p.dtype, (p.m, p.n, p.k), out, x, w, scale=scale, eps=eps,
            next_norm=next_norm, adapters=_fused(c, choice, p, x),
        )  # fmt: skip
        return
    if p.out != "swiglu":
        project(c, p, out, x, w)
        add_adapters(c, p, out, x)
        return
    gate_up = c.scratch(p.m * p.n * item_bytes(p.dtype))
    p = replace(p, out="store")
    project(c, p, gate_up, x, w)
    add_adapters(c, p, gate_up, x, pairs=True)
    silu(c, "silu_mul_pairs", [out, gate_up], p.m * p.n // 2, p.dtype)


def normalised(
    c: LoweringContext, p: GemmProblem, x: Place, norm: Place | None, eps: float
) -> tuple[GemmProblem, Place]:
    """The problem without its norm, and its x, which a launch has normalised if there is a norm."""
    if norm is None:
        return p, x
    to = c.scratch(p.m * p.k * item_bytes(p.dtype))
    return replace(p, norm=False), rms_norm(c, to, x, norm, p.m, p.k, p.dtype, eps)


def add_adapters(c: LoweringContext, p: GemmProblem, out: Place, x: Place, *, pairs: bool = False) -> None:
    """Adds the adapters' outputs to those of a GEMM. pairs: the outputs of two matrices alternate."""
    tokens, most = p.m, c.sizes["W"]
    factors, step = _factors(c, pairs=pairs)
    problem = LoraProblem(factors, c.address("adapters"), tokens, most, p.k, p.n, step, p.dtype)
    h = c.scratch(4 * len(factors) * tokens * most)
    shrink(c, problem, h, x)
    expand(c, problem, out, h, p.dtype)


def _factors(c: LoweringContext, *, pairs: bool) -> tuple[list[Mapping[str, Any]], int]:
    """A lora::Factor for each matrix, and the step between outputs."""
    found, first = [], 0
    for name in matrices_with_adapters(c.call):
        rows = int(c.call.tensors[name].shape[0])
        down, up, ranks = (c.address(f"{part}_{name}") for part in ("down", "up", "ranks"))
        found.append(factor(down, up, ranks, rows, first))
        first += 1 if pairs else rows
    return found, 2 if pairs else 1


def _fused(c: LoweringContext, choice: SkinnyChoice, p: GemmProblem, x: Place) -> Struct:
    """lora::Fused."""
    factors, step = _factors(c, pairs=p.out == "swiglu")
    most, tokens = c.sizes["W"], p.m
    room = _room(most)
    slices = _slices(choice, tokens, len(factors) * room // CHANNELS, p.k, c.sizes["I"])
    sums = c.scratch(4 * slices * tokens * len(factors) * room)
    return struct(
        LORA_FUSED, a=x, adapters=c.address("adapters"), sums=sums, arrivals=Place(ARRIVALS), tokens=tokens,
        most=most, room=room, k=p.k, step=step, factors=len(factors), slices=slices,
        shared=choice.adapters, factor=factors,
    )  # fmt: skip


def _slices(choice: SkinnyChoice, tokens: int, parts: int, k: int, adapters: int) -> int:
    """Slices of k: as many as leave a warp one share at most when the tokens have the most adapters."""
    teams = max(min(tokens, adapters), -(-tokens // 8))
    warps = WARPS * choice.groups * choice.splits
    return max(1, min(warps // (teams * parts), MOST_SLICES, k // LEAST_COLUMNS, GATHERED // tokens))
