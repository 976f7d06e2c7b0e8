"""Layers with adapters: an op and what LoRA adds to each of its GEMMs, as one call.

`with_adapters` makes such a form of any op whose weights are operands. A coarse form is lowered to the op's
own parts with `lora_shrink` and `lora_expand` behind each GEMM, where a backend has no kernel for all of it.
The factors of a weight `w` are the operands `down_w`, `up_w` and `ranks_w`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.ops.cases.lora import bounds_with_adapters, cases_with_adapters
from pegainfer.ops.coarse import GATE_UP_SWIGLU, QKV_NORM_ROPE_APPEND
from pegainfer.ops.fused_heads import PROJECT_HEADS
from pegainfer.ops.fused_norm import (
    LINEAR_RESIDUAL_NORM,
    SCALED_GATE_UP_SWIGLU,
    SCALED_PROJECT_HEADS,
    SCALED_QKV_ROPE_APPEND,
)
from pegainfer.ops.gemm import LINEAR, LINEAR_RESIDUAL
from pegainfer.ops.lora import LORA_EXPAND, LORA_SHRINK, all_of
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.spec import INTS, In, Operand, OpSpec, Role, declare, declare_fused
from pegainfer.ops.tensor import Sizes, Tensor

Array = np.ndarray[Any, Any]
FACTORS = ("down", "up", "ranks")


def weight_operands(spec: OpSpec) -> tuple[Operand, ...]:
    """The matrices that the op multiplies by."""
    return tuple(o for o in spec.operands if o.role is Role.WEIGHT)


def _factors(w: Operand) -> tuple[Operand, ...]:
    n, k = w.axes
    return (
        In(f"down_{w.name}", f"I W {k}", optional=w.optional),
        In(f"up_{w.name}", f"I W {n}", optional=w.optional),
        In(f"ranks_{w.name}", "I", INTS, optional=w.optional, fill=all_of),
    )


def with_adapters(base: OpSpec) -> OpSpec:
    """`base` with what each token's adapter adds to its GEMMs. `adapters`: of each token, -1 for none."""
    weights = weight_operands(base)
    added = (In("adapters", "T", INTS, into="I"), *(o for w in weights for o in _factors(w)))
    cases, flops, lower = base.cases, base.flops, _lowering(base)

    def more_flops(s: Sizes) -> int:
        return flops(s) + sum(2 * s["T"] * s["W"] * (s[w.axes[0]] + s[w.axes[1]]) for w in weights)

    return replace(
        base,
        name=f"lora_{base.name}",
        doc=f"{base.doc}; each GEMM with what the token's adapter adds",
        operands=(*base.operands, *added),
        reference=None if lower is not None else _reference(base),
        lower=lower,
        flops=more_flops,
        bytes=_moved(base, added),
        idle=base.idle + "I",
        cases=None if cases is None else lambda rng: cases_with_adapters(cases(rng), weights, rng),
        tolerance=bounds_with_adapters(base.tolerance, weights),
    )  # fmt: skip


def _moved(base: OpSpec, added: tuple[Operand, ...]) -> Callable[[Sizes, Mapping[str, int]], int]:
    """The op's own bytes, and of the factors those of as many adapters as there are tokens."""
    twice = {o.name for o in base.operands if o.role is Role.INOUT}

    def moved(s: Sizes, held: Mapping[str, int]) -> int:
        own = {o.name: held[o.name] for o in base.operands if o.name in held}
        first = (
            base.bytes(s, own) if base.bytes else sum(n * (2 if k in twice else 1) for k, n in own.items())
        )
        factors = sum(held.get(o.name, 0) for o in added[1:])
        return first + held["adapters"] + factors // s["I"] * min(s["T"], s["I"])

    return moved


def _lowering(base: OpSpec) -> Callable[..., None] | None:
    """Emits the parts of a coarse op, or the op itself, with shrink and expand behind each GEMM."""
    if base.reference is not None and base is not LINEAR_RESIDUAL:
        return None

    def lower(b: Builder, *, adapters: Tensor, **given: Any) -> None:
        factors = {
            w.name: tuple(given.pop(f"{part}_{w.name}") for part in FACTORS) for w in weight_operands(base)
        }
        of_weight = {given[name].storage: f for name, f in factors.items() if given.get(name) is not None}
        begin = len(b.calls)
        if base.lower is not None:
            base.lower(b, **given)
        else:
            b.emit(base, None, **given)
        calls = tuple(b.calls[begin:])
        del b.calls[begin:]
        for number, call in enumerate(Program(b.name, calls).lowered(lambda _: False).calls):
            b.emit(call.spec, call.attrs, **call.tensors)
            if call.spec not in (LINEAR, LINEAR_RESIDUAL):
                continue
            down, up, ranks = of_weight[call.tensors["w"].storage]
            x = call.tensors["out" if call.spec is LINEAR else "x"]
            h = b.buffer(f"{number}.lora", x.shape[0], down.shape[1])
            b.emit(LORA_SHRINK, None, out=h, a=call.tensors["a"], down=down, adapters=adapters, ranks=ranks)
            b.emit(LORA_EXPAND, None, x=x, h=h, up=up, adapters=adapters, ranks=ranks)

    return lower


def _reference(base: OpSpec) -> Callable[..., None]:
    """The op by its own reference, once for each adapter with the weights that it makes of the base's."""
    reference = base.reference
    assert reference is not None
    tokens = {o.name: o.axes.index("T") if "T" in o.axes else 1 for o in base.operands}
    written = [o for o in base.operands if o.role in (Role.OUT, Role.INOUT, Role.STATE)]

    def run(*, adapters: Array, **given: Any) -> None:
        parts = {
            w.name: [given.pop(f"{part}_{w.name}", None) for part in FACTORS] for w in weight_operands(base)
        }
        before = {o.name: given[o.name].copy() for o in written}
        for adapter in np.unique(adapters).tolist():
            own = dict(given)
            for name, (down, up, ranks) in parts.items():
                if adapter >= 0 and own.get(name) is not None:
                    own[name] = _adapted_weight(own[name], down[adapter], up[adapter], int(ranks[adapter]))
            trial = {name: a.copy() for name, a in before.items()}
            reference(**{**own, **trial})
            mine = np.flatnonzero(adapters == adapter)
            for o in written:
                at: Any = (slice(None),) * tokens[o.name] + (mine,)
                if o.role is Role.STATE:  # what these tokens have cached
                    block, offset = np.divmod(given["slots"][mine], given[o.name].shape[-2])
                    at = (block, ..., offset, slice(None))
                given[o.name][at] = trial[o.name][at]

    return run


def _adapted_weight(w: Array, down: Array, up: Array, rank: int) -> Array:
    rank = max(0, min(rank, len(down)))
    delta: Array = up[:rank].astype(np.float64).T @ down[:rank].astype(np.float64)
    return w.astype(np.float64) + delta


LORA_QKV_NORM_ROPE_APPEND = declare(with_adapters(QKV_NORM_ROPE_APPEND))
LORA_GATE_UP_SWIGLU = declare(with_adapters(GATE_UP_SWIGLU))
LORA_LINEAR_RESIDUAL = declare(with_adapters(LINEAR_RESIDUAL))

# By the op: its form with adapters. A forward's calls become those of the first three.
ADAPTED = {
    base.name: form
    for base, form in (
        (QKV_NORM_ROPE_APPEND, LORA_QKV_NORM_ROPE_APPEND),
        (GATE_UP_SWIGLU, LORA_GATE_UP_SWIGLU),
        (LINEAR_RESIDUAL, LORA_LINEAR_RESIDUAL),
        (PROJECT_HEADS, declare_fused(with_adapters(PROJECT_HEADS))),
        (SCALED_PROJECT_HEADS, declare_fused(with_adapters(SCALED_PROJECT_HEADS))),
        (SCALED_QKV_ROPE_APPEND, declare_fused(with_adapters(SCALED_QKV_ROPE_APPEND))),
        (SCALED_GATE_UP_SWIGLU, declare_fused(with_adapters(SCALED_GATE_UP_SWIGLU))),
        (LINEAR_RESIDUAL_NORM, declare_fused(with_adapters(LINEAR_RESIDUAL_NORM))),
    )
}
BASE = {form.name: base for base, form in ADAPTED.items()}
