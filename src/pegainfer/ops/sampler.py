"""The program that turns a step's logits into tokens; the same for every model line."""

from __future__ import annotations

from pegainfer.ops.program import Builder, Program
from pegainfer.ops.sample import SAMPLE
from pegainfer.ops.spec import Role


def sampler(vocab_size: int, max_slots: int, history_width: int, max_logprobs: int) -> Program:
    """One `sample` call. Inputs, outputs and the state `history` bear the names of the op's operands.

    Symbolic sizes: L rows, J biases, E masks, U banned tokens in O sequences.
    """
    axes = {
        "V": vocab_size,
        "I": -(-vocab_size // 32),
        "Z": max_slots,
        "X": history_width,
        "K": min(max_logprobs, vocab_size),
    }
    b = Builder("sampler")
    make = {Role.IN: b.input, Role.OUT: b.output, Role.STATE: b.state}
    tensors = {
        o.name: make[o.role](o.name, *(axes.get(a, a) for a in o.axes), dtype=o.dtypes[0])
        for o in SAMPLE.operands
    }
    b.emit(SAMPLE, None, **tensors)
    return b.build()
