"""Events by which routers follow an engine's prefix cache, in the form of vLLM 0.26's KV events.

Source of names and fields: vLLM, `vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

# Where a block lies, by the kind of its pool.
MEDIA = {"device": "GPU", "host": "CPU", "disk": "DISK"}


class BlockStored(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Blocks that prompts can find in a medium from now on; each continues the prompt of the one before."""

    block_hashes: list[int]  # unsigned, 64 bits
    # Of the block before the first; None at the start of a prompt, and where `token_ids` is empty.
    parent_block_hash: int | None
    # Of all blocks; empty for blocks from an earlier run's disk tier or from a peer.
    token_ids: list[int]
    block_size: int  # tokens
    lora_id: None = msgspec.field(default_factory=lambda: None)  # vLLM's old name for lora_name, always sent
    medium: str | None
    lora_name: str | None
    # For each block what its hash depends on beside tokens: the adapter's name, and a first block's salt.
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """Blocks that a medium no longer has."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache was reset: no medium has any block."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventSink(Protocol):
    """Publishes events. Called on the engine's thread."""

    def publish(self, events: Sequence[KVEvent], data_rank: int) -> None:
        """Takes the changes of one step; never blocks and never raises."""

    def close(self) -> None:
        """Sends what `publish` has taken, for a second at most, and stops."""


@runtime_checkable
class KVEventPolicy(Protocol):
    """A step policy that can publish events of its prefix cache; see also contract.step.StepPolicy."""

    def publish_kv_events(self, sink: KVEventSink) -> None:
        """Publishes the blocks that prompts can find now, and later the changes after each commit.

        The policy's `close` closes it.
        """
