"""The programs that turn what a forward leaves into tokens, log-probabilities and hidden states.

They are the same for all lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from pegainfer.ops.coarse import LM_HEAD
from pegainfer.ops.embed import GATHER_ROWS
from pegainfer.ops.norm import RMS_NORM
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.sample import SAMPLE, TOKEN_LOGPROBS
from pegainfer.ops.spec import OpSpec, Role
from pegainfer.ops.tensor import Tensor
from pegainfer.ops.weights import LayeredConfig, WeightTable


def sampler(columns: int, vocab_size: int, max_slots: int, history_width: int, max_logprobs: int) -> Program:
    """One `sample` call. Inputs, outputs and the state `history` bear the names of the op's operands.

    Symbolic sizes: L rows, J biases, E masks, U banned tokens in O sequences.

    Args:
        columns: of the logits: the head's rows.
        vocab_size: ids that tokens have; the columns behind them are padding and never drawn.
    """
    axes = {
        "V": columns,
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
    b.emit(SAMPLE, {"vocab_size": vocab_size}, **tensors)
    return b.build()


class Head(msgspec.Struct, frozen=True):
    """The end of a forward: from the residual stream to logits by one norm and one matrix.

    Args:
        norm, weight: names of the weights, norm [M] and weight [V, M], with their storage formats.
        residual: storage format of the residual stream.
    """

    vocab_size: int  # rows of the matrix, which may be more than there are tokens
    hidden_size: int
    eps: float
    norm: str
    norm_format: str
    weight: str
    weight_format: str
    residual: str


class HeadConfig(LayeredConfig, Protocol):
    """What a head needs of a line's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...


def head_of(table: WeightTable, config: HeadConfig, formats: Mapping[str, str], residual: str) -> Head:
    """The last call of a forward that ends with the weight `norm` and the table's head.

    Args:
        formats: storage format of each weight by its name.
        residual: storage format of the residual stream.
    """
    name = table.head_name(config)
    return Head(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        eps=config.norm_eps,
        norm="norm",
        norm_format=formats["norm"],
        weight=name,
        weight_format=formats[name],
        residual=residual,
    )


def prompt_logprobs(head: Head, vocab_size: int, max_logprobs: int) -> Program:
    """Log-probabilities of given tokens after rows of the residual stream `x` that a forward has left.

    A program of its own, because logits at every position are more than one step's output holds. Inputs are
    x, logit_rows, targets and top_lens; outputs bear the names of token_logprobs' operands. `vocab_size` is
    the number of ids that tokens have.
    """
    hidden, vocab = head.hidden_size, head.vocab_size
    b = Builder("prompt_logprobs")
    x = b.input("x", "T", hidden, dtype=head.residual)
    rows, targets, top_lens = (b.input(name, "L") for name in ("logit_rows", "targets", "top_lens"))
    norm = b.weight(head.norm, hidden, dtype=head.norm_format)
    w = b.weight(head.weight, vocab, hidden, dtype=head.weight_format)
    logits = b.buffer("logits", "L", vocab)
    results = _outputs(b, TOKEN_LOGPROBS, {"V": vocab, "K": min(max_logprobs, vocab_size)})
    b.emit(LM_HEAD, {"eps": head.eps}, logits=logits, x=x, rows=rows, norm=norm, w=w)
    b.emit(
        TOKEN_LOGPROBS, {"vocab_size": vocab_size},
        **results, logits=logits, targets=targets, top_lens=top_lens,
    )  # fmt: skip
    return b.build()


def hidden_states(head: Head) -> Program:
    """Rows of the residual stream `x` that a forward has left, after the final norm.

    Inputs are x and rows; output is hidden [L, M] in x's format.
    """
    b = Builder("hidden_states")
    x = b.input("x", "T", head.hidden_size, dtype=head.residual)
    rows = b.input("rows", "L")
    norm = b.weight(head.norm, head.hidden_size, dtype=head.norm_format)
    picked = b.buffer("picked", "L", head.hidden_size, dtype=head.residual)
    hidden = b.output("hidden", "L", head.hidden_size, dtype=head.residual)
    b.emit(GATHER_ROWS, None, out=picked, x=x, rows=rows)
    b.emit(RMS_NORM, {"eps": head.eps}, out=hidden, x=picked, weight=norm)
    return b.build()


def _outputs(b: Builder, spec: OpSpec, axes: dict[str, int]) -> dict[str, Tensor]:
    """An output for each operand that the op writes."""
    return {
        o.name: b.output(o.name, *(axes.get(a, a) for a in o.axes), dtype=o.dtypes[0])
        for o in spec.operands
        if o.role is Role.OUT
    }
