"""Weights without a file: seeded values of the right shapes, for measurements without a checkpoint."""

from __future__ import annotations

from math import prod
from typing import Any
from zlib import crc32

import numpy as np

from pegainfer.runtime.weights.part import Extent, Memory, Part
from pegainfer.runtime.weights.weight import VALUES, Weight

Array = np.ndarray[Any, Any]

# Matrices whose rows score the vocabulary are PEAK times larger, so that logits have clear winners, as a
# trained model's have.
HEADS, PEAK = ("embed", "lm_head"), 8.0
STEP = 4  # values between the beginnings of neighbouring rows


def made_up(name: str, weight: Weight) -> Weight:
    """The weight with bf16 values that depend on its name alone: vectors of ones, matrices of normals.

    The normals keep activations of order one. Neighbouring rows of a matrix overlap in memory: the whole
    takes STEP values a row in place of its width, so a large model is made up in little memory.
    """
    width, rows = weight.shape[-1], prod(weight.shape[:-1])
    if len(weight.shape) == 1:
        data = _bf16(np.ones(width, np.float32))
        return Weight(weight.scheme, weight.shape, {VALUES: Part.at("bf16", weight.shape, Memory(data), 0)})
    rng = np.random.default_rng(crc32(name.encode()))
    scale = width**-0.5 * (PEAK if name in HEADS else 1.0)
    values = rng.standard_normal((rows - 1) * STEP + width, np.float32) * np.float32(scale)
    extent = Extent(Memory(_bf16(values)), 0, rows, 2 * STEP, 2 * width)
    return Weight(weight.scheme, weight.shape, {VALUES: Part("bf16", weight.shape, (extent,))})


def _bf16(values: Array) -> Array:
    """Float32 cut to bf16, as bytes."""
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
