"""Opens the KV tiers that a configuration asks for: sizes, stores, and the digest that records carry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegainfer import __version__
from pegainfer.app.config import EngineConfig
from pegainfer.app.open_tiers import OpenTiers
from pegainfer.app.peers import decode_side, prefill_side, shared_memory
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.tiers import Tier
from pegainfer.kv.device.disk import DiskStore, record_bytes
from pegainfer.kv.device.layout import GroupLayout, PageLayout, block_bytes
from pegainfer.kv.device.store import Allocate, BlockStore, HostStore, reserve
from pegainfer.ops.ranks import TensorRank
from pegainfer.peers.decode import PeerStore

if TYPE_CHECKING:
    from pegainfer.kv.device.cuda_copies import PinnedMemory
    from pegainfer.peers.transport import SharedMemory

SAMPLES = 64  # places of each weights file that the digest reads
SAMPLE_BYTES = 4096
# Blocks and states of peers that the bookkeeping can know of; they take no memory here.
PEER_BLOCKS, PEER_STATES = 1 << 15, 1 << 10
SHARED_SLAB = 1 << 30  # bytes


def tier_blocks(
    groups: Sequence[GroupLayout], memory: int, snapshot_share: float, *, records: bool = False
) -> list[int]:
    """Blocks or states of each group in a tier of `memory` bytes.

    Pages of all groups are for the same number of tokens; states get `snapshot_share` where there are pages.

    Args:
        records: whether a block takes a record of the disk tier.
    """
    sizes = [record_bytes(block_bytes(g)) if records else block_bytes(g) for g in groups]
    paged = any(isinstance(g, PageLayout) for g in groups)
    states = [n for g, n in zip(groups, sizes, strict=True) if not isinstance(g, PageLayout)]
    for_states = int(memory * snapshot_share) if paged and states else memory if states else 0
    per_token = sum(n / g.block_size for g, n in zip(groups, sizes, strict=True) if isinstance(g, PageLayout))
    tokens = (memory - for_states) / per_token if paged else 0.0
    return [
        int(tokens / g.block_size) if isinstance(g, PageLayout) else for_states // sum(states) for g in groups
    ]


def open_tiers(
    config: EngineConfig,
    groups: Sequence[GroupLayout],
    path: Path,
    at: TensorRank,
    pinned: PinnedMemory | None = None,
) -> OpenTiers:
    """The tiers of one rank, the fastest first. Raises ConfigError.

    Args:
        pinned: makes memory that the device copies from and to.
        groups: of the rank.
        path: of the model's file or folder.
    """
    nbytes = [block_bytes(g) for g in groups]
    tiers: list[Tier] = []
    stores: list[BlockStore] = []
    free = pinned.close if pinned is not None else None
    memory = shared_memory(config) if pinned is None else None
    for tier in planned_tiers(config, groups, at.ranks):
        if tier.kind == "host":
            # Shared memory is taken as it is used, and each slab costs a descriptor.
            slab = {"slab_bytes": SHARED_SLAB} if memory is not None else {}
            stores.append(HostStore(nbytes, tier.num_blocks, memory or pinned, **slab))
        else:
            folder, _ = parse_disk(config.kv_offload_disk)
            folder = folder / f"rank{at.rank}" if at.ranks > 1 else folder
            digest = content_digest(config, groups, path, at)
            disk = DiskStore(folder, digest, nbytes, tier.num_blocks, pinned or reserve)
            tier = msgspec.structs.replace(tier, stored=disk.stored())
            stores.append(disk)
        tiers.append(tier)
    opened = OpenTiers(tuple(tiers), tuple(stores), memory.close if memory is not None else free)
    if config.role == "both":
        return opened
    try:
        digest = content_digest(config, groups, path, at, times=False)
        return with_peers(opened, config, digest, groups, memory, pinned or reserve)
    except BaseException:
        opened.close()
        raise


def with_peers(
    opened: OpenTiers,
    config: EngineConfig,
    digest: bytes,
    groups: Sequence[GroupLayout],
    memory: SharedMemory | None,
    allocate: Allocate,
) -> OpenTiers:
    """The tiers with the connections of a prefill or decode engine. Raises ConfigError.

    Args:
        memory: of the host tier, where other processes can map it.
        allocate: makes buffers for blocks.
    """
    if config.role == "prefill":
        return msgspec.structs.replace(opened, peers=prefill_side(config, digest, opened.stores[0], memory))
    side = decode_side(config, digest)
    store = PeerStore(side, [block_bytes(g) for g in groups], allocate)
    sizes = tuple(PEER_BLOCKS if isinstance(g, PageLayout) else PEER_STATES for g in groups)
    tier = Tier(kind="peer", num_blocks=sizes)
    return OpenTiers((*opened.tiers, tier), (*opened.stores, store), opened.free, side)


def planned_tiers(config: EngineConfig, groups: Sequence[GroupLayout], ranks: int) -> tuple[Tier, ...]:
    """The tiers of each rank before they are opened, the fastest first. Raises ConfigError."""
    tiers: list[Tier] = []
    if config.kv_offload:
        blocks = tier_blocks(groups, config.kv_offload // ranks, config.snapshot_share)
        _check(blocks, config.kv_offload, "kv_offload")
        tiers.append(Tier(kind="host", num_blocks=tuple(blocks)))
    if config.kv_offload_disk:
        size = parse_disk(config.kv_offload_disk)[1]
        blocks = tier_blocks(groups, size // ranks, config.snapshot_share, records=True)
        _check(blocks, size, "kv_offload_disk")
        tiers.append(Tier(kind="disk", num_blocks=tuple(blocks)))
    return tuple(tiers)


def parse_disk(text: str) -> tuple[Path, int]:
    """Folder and bytes of 'DIR:200GiB'. Raises ConfigError."""
    from pegainfer.app.options import parse_bytes

    folder, _, size = text.rpartition(":")
    if not folder:
        raise ConfigError(
            "bad kv_offload_disk", expected="a folder and a size, as /var/cache/kv:200GiB", got=repr(text)
        )
    return Path(folder).expanduser().absolute(), parse_bytes(size)


def _check(blocks: Sequence[int], nbytes: int, where: str) -> None:
    if min(blocks) < 1:
        raise ConfigError(
            "a KV tier holds not one block of each group",
            expected="room for some thousand tokens", got=f"{nbytes / 2**20:.2f} MiB", where=where,
        )  # fmt: skip


def content_digest(
    config: EngineConfig,
    groups: Sequence[GroupLayout],
    path: Path,
    at: TensorRank,
    *,
    times: bool = True,
) -> bytes:
    """32 bytes that differ wherever the same tokens may leave other bytes in a block.

    That is the model (names, sizes, times of change and samples of its files: to read them whole would take
    longer than the start), how it is computed, the layout of blocks, the shard, and this package's version.

    Args:
        times: whether times of change count, which differ between copies of a file.
    """
    h = hashlib.sha256(b"pegainfer-tier-1")
    computed = (
        config.backend,
        config.isa,
        config.activation,
        config.kv_format,
        config.quantization,
        __version__,
    )
    h.update(repr((computed, at, groups)).encode())
    for file in sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]:
        stat = file.stat()
        h.update(repr((file.name, stat.st_size, stat.st_mtime_ns if times else 0)).encode())
        with open(file, "rb") as opened:
            for i in range(SAMPLES):
                opened.seek(i * stat.st_size // SAMPLES)
                h.update(opened.read(SAMPLE_BYTES))
    return h.digest()
