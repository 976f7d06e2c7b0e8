"""Tokens that each expert of each layer was given, counted from what a step's program left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pegainfer.contract.experts import ExpertTokens
from pegainfer.ops.expert_counts import Choices

Array = np.ndarray[Any, Any]


class ExpertCounts:
    """Totals since the start. `add` is called by the runner's thread; `tokens` may be called from any."""

    def __init__(self, choices: Sequence[Choices]) -> None:
        """`choices`: at least one, each among as many experts."""
        self._choices = choices
        self._totals = np.zeros((len(choices), choices[0].num_experts), np.int64)

    def add(self, outputs: Mapping[str, Array]) -> None:
        """Counts a step by its program's outputs."""
        num_experts = self._totals.shape[1]
        for total, choices in zip(self._totals, self._choices, strict=True):
            total += np.bincount(outputs[choices.output].reshape(-1), minlength=num_experts)

    def tokens(self) -> ExpertTokens:
        layers = tuple(choices.layer for choices in self._choices)
        return ExpertTokens(layers, self._totals.shape[1], self._totals.astype("<i8").tobytes())
