"""One KV group's pools from the device downwards."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.contract.errors import InvariantError
from pegainfer.kv.blocks import BlockPool


class Levels:
    """One group's pools from the device downwards, searched as one.

    A place is a block's id plus the sizes of all pools above its own, so that places of device blocks are
    their ids.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self.pools = pools

    def lookup(self, key: bytes) -> int | None:
        """The place of `key` in the highest pool that has it."""
        offset = 0
        for pool in self.pools:
            block = pool.lookup(key)
            if block is not None:
                return offset + block
            offset += pool.num_blocks
        return None

    def lookup_run(self, keys: Sequence[bytes]) -> list[int]:
        """The places of `keys` up to the first that no pool has."""
        found: list[int] = []
        for key in keys:
            place = self.lookup(key)
            if place is None:
                break
            found.append(place)
        return found

    def locate(self, place: int) -> tuple[int, int]:
        """Pool number and block id of a place."""
        for number, pool in enumerate(self.pools):
            if place < pool.num_blocks:
                return number, place
            place -= pool.num_blocks
        raise InvariantError(f"place {place} lies below the last tier")
