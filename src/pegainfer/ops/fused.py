"""Fused forms: ops that no forward emits. Rewrites put them in the place of the calls that they combine.

The reference of each is the composition of the references of those calls. ops/fused_heads.py and
ops/fused_norm.py have those of a layer. Here are:

Rows that sampling does not adjust: `adjust_some_logits` writes the scores of the other rows only, and
`sample_some_tokens` draws from the logits of the rows that it left.

`decode_pass`: a whole forward pass as one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.ops.program import Builder, OpCall
from pegainfer.ops.sample import ADJUST_LOGITS, SAMPLE_TOKENS
from pegainfer.ops.spec import INTS, In, OpSpec, Out, declare_fused
from pegainfer.ops.tensor import Tensor

Array = np.ndarray[Any, Any]
DECODE_PASS = "decode_pass"


def _adjust_some(scores: Array, plain: Array, logits: Array, *, vocab_size: int, **options: Array) -> None:
    neutral = {o.name: o.neutral for o in ADJUST_LOGITS.operands if o.neutral is not None}
    left = np.all([options[name] == value for name, value in neutral.items()], axis=0)
    adjusted = np.empty_like(scores)
    assert ADJUST_LOGITS.reference is not None
    ADJUST_LOGITS.reference(scores=adjusted, logits=logits, vocab_size=vocab_size, **options)
    scores[~left], plain[...] = adjusted[~left], left


def _sample_some(
    tokens: Array,
    status: Array,
    scores: Array,
    plain: Array,
    logits: Array,
    *,
    vocab_size: int,
    **options: Array,
) -> None:
    chosen = np.where(plain.astype(bool)[:, None], logits, scores)
    assert SAMPLE_TOKENS.reference is not None
    SAMPLE_TOKENS.reference(tokens=tokens, status=status, scores=chosen, vocab_size=vocab_size, **options)


_SCORES, _LOGITS, *_OPTIONS = ADJUST_LOGITS.operands
_TOKENS, _STATUS, _, *_DRAW = SAMPLE_TOKENS.operands

ADJUST_SOME_LOGITS = declare_fused(
    OpSpec(
        name="adjust_some_logits",
        doc="adjust_logits of rows with an option; plain[l] is 1 for the others, whose scores stay unwritten",
        operands=(_SCORES, Out("plain", "L", INTS), _LOGITS, *_OPTIONS),
        attrs=ADJUST_LOGITS.attrs,
        reference=_adjust_some,
        flops=ADJUST_LOGITS.flops,
        bytes=ADJUST_LOGITS.bytes,
        idle=ADJUST_LOGITS.idle,
        requires=ADJUST_LOGITS.requires,
    )
)

SAMPLE_SOME_TOKENS = declare_fused(
    OpSpec(
        name="sample_some_tokens",
        doc="sample_tokens of scores, and of logits where adjust_some_logits has left a row plain",
        operands=(
            _TOKENS,
            _STATUS,
            In("scores", "L V", ("f32",)),
            In("plain", "L", INTS),
            In("logits", "L V", ("f32",)),
            *_DRAW,
        ),
        attrs=SAMPLE_TOKENS.attrs,
        reference=_sample_some,
        flops=SAMPLE_TOKENS.flops,
    )
)


def decode_pass(calls: Sequence[OpCall]) -> OpCall:
    """One call in the place of all of these, with their operands by `<number>.<operand>`."""
    used = [(i, o, c) for i, c in enumerate(calls) for o in c.spec.operands if o.name in c.tensors]
    spec = OpSpec(
        name=DECODE_PASS,
        doc="the forward pass of one decoded row",
        operands=tuple(replace(o, name=f"{i}.{o.name}") for i, o, _ in used),
        attrs=("calls",),
        lower=_emit_all,
        flops=lambda s: sum(c.spec.flops(c.sizes(s)) for c in calls),
    )
    return OpCall(spec, {f"{i}.{o.name}": c.tensors[o.name] for i, o, c in used}, {"calls": tuple(calls)}, {})


def _emit_all(b: Builder, *, calls: Sequence[OpCall], **operands: Tensor) -> None:
    for call in calls:
        b.emit(call.spec, call.attrs, **call.tensors)
