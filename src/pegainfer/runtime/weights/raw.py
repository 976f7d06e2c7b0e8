"""A weight as a file holds it, on its way into a backend's own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RawWeight:
    """Bytes of one tensor, not yet packed.

    Args:
        format: storage format, 'f32', 'bf16', 'q4_1' …, in lower case.
        shape: [N, K] (or [K]), row-major, blocks along the last axis.
        data: uint8, C-contiguous, usually a view of a mapped file.
        row_order: if given, row i of the weight is row row_order[i] of `data` (undoes a converter's
            permutation without a copy).
        release: gives the file's pages back to the system; whoever has copied the data may call it.
        origin: (path, offset) of `data`'s bytes in a file, where they can be read without the mapping.
    """

    format: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]
    row_order: np.ndarray[Any, Any] | None = None
    release: Callable[[], None] | None = None
    origin: tuple[str, int] | None = None
