"""Counts of the tokens that a model's experts are given."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


class ExpertTokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the experts of each layer were given since the start."""

    layers: tuple[int, ...]  # numbers of the model's layers with experts
    num_experts: int  # of each of them
    tokens: bytes  # int64 LE [layers, num_experts]


@runtime_checkable
class CountingRunner(Protocol):
    """A runner that can count which experts tokens go to: `RunnerInfo.counts_experts`."""

    def expert_tokens(self) -> ExpertTokens | None:
        """Totals since the start, None where they are not counted. Called on any thread."""
