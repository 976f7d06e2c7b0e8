"""Memory tiers for KV blocks and states, and the transfers that move blocks between them."""

from __future__ import annotations

from typing import Literal

import msgspec

DEVICE = 0  # pool number of the memory that kernels read
# Longest time that a plan with `wait_transfers` takes when no transfer ends. It is short because the engine
# accepts no request meanwhile.
TRANSFER_WAIT_SECONDS = 0.002


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A memory level below the device. Pool number p > 0 is `RunnerInfo.tiers[p - 1]`.

    Every data-parallel rank has a pool of this size of its own.
    """

    kind: Literal["host", "disk", "peer"]  # pinned DRAM, a local disk, the memory of another engine
    num_blocks: tuple[int, ...]  # blocks (or states) for each KV group, ids 0..n-1; 0: not in this tier
    # What an earlier run left in a tier that outlives the process: for each group (block, key), the longest
    # unused first; (): nothing.
    stored: tuple[tuple[tuple[int, bytes], ...], ...] = ()


class Transfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asynchronous copy of one block (or state) of one KV group from one pool to another of the same rank.

    The runner may start it when it receives the plan, before, during or after the plan's rows: the source is
    complete by then, and no plan in flight uses the target. Until the transfer has ended
    (`StepResult.landed` or `StepResult.failed`), both blocks are held: nobody overwrites the source, and
    nobody reads or writes the target. After a failure the target's content is undefined.
    """

    id: int  # counts up from 1 over the engine's life, never reused
    group: int
    source_pool: int  # DEVICE or the number of a tier
    source: int  # block (or state) id in that pool
    target_pool: int
    target: int
    rank: int = 0  # data-parallel rank whose pools these are
    # Hash of the prefix that the block ends. Tiers keep it beside the content, and a load whose source holds
    # another key fails.
    key: bytes = b""


class Traffic(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What transfers from one pool to another have moved since the result before."""

    source_pool: int
    target_pool: int
    blocks: int  # that have landed
    nbytes: int  # of them
    seconds: float  # from the start to the end of each copy, summed; without the time in the queue
