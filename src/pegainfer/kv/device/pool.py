"""Memory for the blocks and states of all KV groups: one array a part, copies of whole blocks."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import BlockCopy
from pegainfer.kv.device.layout import GroupLayout, Part
from pegainfer.kv.device.store import Bytes

Array = np.ndarray[Any, Any]
# Storage formats of parts in host memory.
DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f8_e4m3": np.dtype(np.uint8),
}


class HostPools:
    """The pools of all groups in host memory.

    Memory is reserved at start and taken from the system only as blocks are first written. It holds zeros
    until then.

    Args:
        states: by part name: [num_blocks, *shape].
    """

    def __init__(self, layouts: Sequence[GroupLayout], num_blocks: Sequence[int]) -> None:
        """Raises ConfigError where the system does not reserve so much, or for another format."""
        self.states: dict[str, Array] = {}
        self._groups: list[list[Array]] = []
        for layout, count in zip(layouts, num_blocks, strict=True):
            arrays = {part.name: _reserve(part, count) for part in layout.parts}
            self.states |= arrays
            self._groups.append(list(arrays.values()))

    def gather(self, group: int, block: int, out: Bytes) -> None:
        """See transfers.DeviceCopies."""
        at = 0
        for array in self._groups[group]:
            part = array[block].reshape(-1).view(np.uint8)
            out[at : at + len(part)] = part
            at += len(part)

    def scatter(self, group: int, block: int, data: Bytes) -> None:
        """See transfers.DeviceCopies."""
        at = 0
        for array in self._groups[group]:
            part = array[block].reshape(-1).view(np.uint8)
            part[:] = data[at : at + len(part)]
            at += len(part)

    def finish(self) -> None:
        """Copies have ended when they return."""

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copies blocks in order; each source is read when its turn comes."""
        for c in copies:
            for array in self._groups[c.group]:
                array[c.dst] = array[c.src]


def _reserve(part: Part, count: int) -> Array:
    if part.dtype not in DTYPES:
        raise ConfigError(
            "host memory holds no such KV format", expected=" or ".join(DTYPES), got=part.dtype,
            where=part.name,
        )  # fmt: skip
    nbytes = count * part.nbytes
    try:
        memory = mmap.mmap(-1, max(1, nbytes))
    except (OSError, ValueError, OverflowError) as e:
        raise ConfigError(
            "cannot reserve memory for the KV cache",
            expected=f"{nbytes / 2**20:.0f} MiB for {part.name}",
            got=str(e),
            remedy="lower kv_cache_memory or max_model_len",
        ) from None
    array: Array = np.frombuffer(memory, DTYPES[part.dtype], count * prod(part.shape))
    return array.reshape(count, *part.shape)
