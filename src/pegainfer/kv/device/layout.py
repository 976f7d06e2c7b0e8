"""What a block or state of each KV group consists of on a device. A line declares it; all else follows.

The contract's KVSpec, the pools, the states that the forward program is recorded with and the inputs of each
step are made from one tuple of layouts. The order of the tuple is the order of the groups in plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.step import KVSpec, PageGroup, StateGroup
from pegainfer.runtime.weights.formats import FORMATS


class Part(msgspec.Struct, frozen=True):
    """One tensor of a group: [num_blocks, *shape] in storage format `dtype`.

    Args:
        name: of the forward program's state; unique among all groups of a line.
        shape: of one block or state. Kernels decide what the axes mean; copies move whole blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one block or state."""
        return FORMATS[self.dtype].nbytes(prod(self.shape))


class PageLayout(msgspec.Struct, frozen=True):
    """A group of pages: a block holds what `block_size` tokens leave behind.

    Args:
        block_size: tokens a block, whatever a block holds of them (keys and values, a latent vector, one
            compressed entry for several tokens).
        window: tokens that are ever read again; 0: all.
    """

    name: str
    parts: tuple[Part, ...]
    block_size: int
    window: int = 0


class StateLayout(msgspec.Struct, frozen=True):
    """A group of recurrent states, one a sequence, which each step overwrites.

    Args:
        snapshot_every: see contract.step.StateGroup.
    """

    name: str
    parts: tuple[Part, ...]
    snapshot_every: int = 0


GroupLayout = PageLayout | StateLayout


def block_bytes(layout: GroupLayout) -> int:
    """Bytes of one block or state over all parts."""
    return sum(part.nbytes for part in layout.parts)


def kv_spec(layouts: Sequence[GroupLayout]) -> KVSpec:
    """The groups as the scheduler sees them. Raises ConfigError where two groups or parts share a name."""
    for what, names in {
        "groups": [layout.name for layout in layouts],
        "parts": [part.name for layout in layouts for part in layout.parts],
    }.items():
        if len(set(names)) != len(names):
            raise ConfigError(f"KV {what} share a name", expected="distinct names", got=" ".join(names))
    return KVSpec(tuple(_group(layout) for layout in layouts))


def _group(layout: GroupLayout) -> PageGroup | StateGroup:
    nbytes = block_bytes(layout)
    if isinstance(layout, PageLayout):
        return PageGroup(
            name=layout.name,
            block_size=layout.block_size,
            bytes_per_block=nbytes,
            window=layout.window,
        )
    return StateGroup(name=layout.name, bytes_per_state=nbytes, snapshot_every=layout.snapshot_every)
