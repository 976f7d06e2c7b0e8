"""Memory for KV blocks: reserved at start, taken from the system only as blocks are first written."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import BlockCopy

Array = np.ndarray[Any, Any]


class KVPool:
    """Blocks of one group in host memory.

    `array` is [num_blocks, *block_shape]; how a block is ordered inside is the kernels' business, copies move
    whole blocks.
    """

    def __init__(self, num_blocks: int, block_shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Raises ConfigError where the system will not reserve so much."""
        nbytes = num_blocks * prod(block_shape) * dtype.itemsize
        try:
            self._map = mmap.mmap(-1, nbytes)
        except (OSError, ValueError, OverflowError) as e:
            raise ConfigError(
                "cannot reserve memory for the KV cache",
                expected=f"{nbytes / 2**20:.0f} MiB",
                got=str(e),
                remedy="lower kv_cache_memory or max_model_len",
            ) from None
        self.array: Array = np.frombuffer(self._map, dtype).reshape(num_blocks, *block_shape)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies blocks in order; each source is read when its turn comes."""
        for c in copies:
            self.array[c.dst] = self.array[c.src]
