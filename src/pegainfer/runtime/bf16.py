"""bf16, which NumPy lacks: arrays hold its bits as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def to_bf16(values: Array) -> Array:
    """float32 to bf16 bits (uint16), round to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bf16(bits: Array) -> Array:
    """bf16 bits (uint16) as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
