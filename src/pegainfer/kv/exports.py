"""Blocks that are offered to another engine: copied to host memory as they are computed, and held there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from pegainfer.contract.peers import PeerBlock
from pegainfer.contract.step import PageGroup
from pegainfer.contract.tiers import DEVICE
from pegainfer.kv.moves import Moves
from pegainfer.kv.prefix import first_in_window
from pegainfer.kv.saving import Saver

HOST = 1  # number of the pool that other engines read


class Export(msgspec.Struct, eq=False):
    """One prompt whose blocks are offered."""

    hashes: Sequence[bytes]  # of the prompt's full units
    last: int  # tokens of the longest prefix that a prompt of this length can reuse
    position: int = 0  # units that were looked at
    # (group, key) on their way to the host
    copying: deque[tuple[int, bytes]] = msgspec.field(default_factory=deque)
    held: list[tuple[int, int]] = msgspec.field(default_factory=list)  # (group, block of the host pool)


class Exports:
    """Of one data-parallel rank. Mutates the pools that `moves` names."""

    def __init__(self, moves: Moves, saver: Saver) -> None:
        self._moves = moves
        self._saver = saver
        self._open: list[Export] = []

    def open(self, hashes: Sequence[bytes], num_tokens: int, stride: int) -> Export:
        """Begins to offer a prompt of so many tokens; it is held until `close`.

        Args:
            stride: tokens between two positions that a prefix hit can have.
        """
        export = Export(hashes, (num_tokens - 1) // stride * stride)
        self._open.append(export)
        return export

    def close(self, export: Export) -> None:
        """Gives the export's blocks back."""
        self._open.remove(export)
        for g, block in export.held:
            self._moves.levels[g].pools[HOST].release(block, after=0)
        export.held = []

    def advance(self, export: Export, computed: int) -> list[PeerBlock]:
        """What can be read since the last call, now that the first `computed` tokens of the prompt are known.

        A block that is neither in host memory nor can be copied there is left out: the peer computes it.
        """
        ready: list[PeerBlock] = []
        for _ in range(len(export.copying)):
            g, key = export.copying.popleft()
            self._offer(export, g, key, ready, first=False)
        unit = self._moves.unit
        while export.position < min(computed, export.last) // unit:
            export.position += 1
            end = export.position * unit
            for g, group in enumerate(self._moves.groups):
                if isinstance(group, PageGroup):
                    first = first_in_window(group, export.last) * group.block_size
                    wanted = end % group.block_size == 0 and end > first
                else:
                    wanted = end == export.last
                if wanted:
                    self._offer(export, g, export.hashes[export.position - 1], ready, first=True)
        return ready

    def _offer(self, export: Export, g: int, key: bytes, ready: list[PeerBlock], *, first: bool) -> None:
        """Holds a block that is in host memory, or has it copied there; `first`: at the first attempt."""
        pools = self._moves.levels[g].pools
        block = pools[HOST].lookup(key)
        if block is not None:
            pools[HOST].acquire(block)
            export.held.append((g, block))
            ready.append(PeerBlock(g, key, block))
            return
        source = pools[DEVICE].lookup(key)
        if first and source is not None:
            self._saver.save_cached(g, source)
        if self._moves.coming(g, HOST, key) is not None or self._saver.wants(g, source, key):
            export.copying.append((g, key))

    def holders(self, g: int) -> Counter[int]:
        """References to blocks of a group's host pool that exports hold."""
        return Counter(block for export in self._open for group, block in export.held if group == g)
