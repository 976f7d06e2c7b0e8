"""Sizes of steps that op benches measure at, by device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepShape:
    """Rows of one step: each computes `count` tokens and has `context` cached ones then; all sample."""

    rows: int
    count: int
    context: int

    @property
    def env(self) -> dict[str, int]:
        """T, R, L, and C and Q for costs."""
        pairs = self.count * self.context - self.count * (self.count - 1) // 2
        tokens = {"T": self.rows * self.count, "R": self.rows, "L": self.rows}
        return tokens | {"C": self.rows * self.context, "Q": self.rows * pairs}


@dataclass(frozen=True)
class StepSizes:
    """The steps that a device's ops are measured at.

    Args:
        decodes: rows with one token each, for GEMMs and attention.
        others: the same for all other ops.
        prefills: seen by ops that work on all tokens of a step, not by those of the rows that sample.
        long: more contexts, for attention.
    """

    decodes: tuple[StepShape, ...]
    others: tuple[StepShape, ...]
    prefills: tuple[StepShape, ...]
    long: tuple[StepShape, ...]


def _decodes(batches: Iterable[int], context: int) -> tuple[StepShape, ...]:
    return tuple(StepShape(rows, 1, context) for rows in batches)


def _prefills(*counts: int) -> tuple[StepShape, ...]:
    return tuple(StepShape(1, count, count) for count in counts)


CPU_STEP_SIZES = StepSizes(
    decodes=_decodes((1, 2, 4, 8, 16), 128),
    others=_decodes((1, 2, 4, 8, 16), 128),
    prefills=_prefills(128, 512),
    long=(
        *(StepShape(1, 1, context) for context in (1024, 4096, 8192)),
        *_decodes((2, 4, 8, 16), 1024),
        StepShape(1, 128, 4096),
    ),
)
GPU_STEP_SIZES = StepSizes(
    decodes=_decodes((1, 8, 16, 32, 64, 128, 256), 1024),
    others=_decodes((1, 8, 64, 256), 1024),
    prefills=_prefills(128, 512, 1024, 2048),
    long=(
        *_decodes((1, 8, 64), 256),
        *(StepShape(rows, 1, 8192) for rows in (1, 8, 32)),
        # The last block of a prompt whose prefix is cached.
        *(StepShape(1, 16, context) for context in (1024, 4096, 16384)),
        StepShape(1, 512, 4096),
        StepShape(1, 2048, 8192),
    ),
)
