"""What a bench puts into operands that are no plain activations, as a step of a model would."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.cases.common import normal
from pegainfer.ops.cases.pointwise import rotation_table
from pegainfer.ops.spec import Fill

Array = np.ndarray[Any, Any]

ROPE_THETA = 1e4
LOGITS_SPREAD = 4.0  # standard deviation of a trained model's logits, about


def constant(value: float) -> Fill:
    """One value throughout: what switches a feature off where no setting names the operand."""
    return lambda rng, shape: np.full(shape, value)


def logits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Logits or scores: [L, V] float32."""
    return normal(rng, shape) * np.float32(LOGITS_SPREAD)


def seeds(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Seeds of draws: [L] uint64."""
    return rng.integers(0, 2**64, shape, dtype=np.uint64)


def rotation(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Cosines and sines of RoPE: [P, D] float32."""
    length, width = shape
    return rotation_table(length, width, ROPE_THETA)
