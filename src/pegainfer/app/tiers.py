"""Opens the KV tiers and peers that a configuration asks for.

app/tier_stores.py and app/peers.py are imported only if the configuration asks for any, so that other servers
start faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pegainfer.app.config import EngineConfig
from pegainfer.app.open_tiers import OpenTiers
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.ops.ranks import TensorRank

if TYPE_CHECKING:
    from pegainfer.kv.device.cuda_copies import PinnedMemory


def has_tiers_or_peers(config: EngineConfig) -> bool:
    """Whether KV blocks may lie anywhere but on the device."""
    return bool(config.kv_offload or config.kv_offload_disk or config.prefill_peers or config.role != "both")


def check_role(config: EngineConfig, scheduler: SchedulerConfig) -> None:
    """Raises ConfigError where an engine cannot have the role that it is given."""
    if config.role != "decode" and config.prefill_peers:
        raise ConfigError(
            "only a decode engine has prefill peers", expected="--role decode", got=f"--role {config.role}",
            where="prefill_peers",
        )  # fmt: skip
    if config.role == "both":
        return
    if not scheduler.prefix_cache:
        raise ConfigError("engines share blocks of the prefix cache, which is off", where="role")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "engines with several ranks share no blocks so far", expected=1, got=config.tensor_parallel_size,
            where="tensor_parallel_size", remedy="leave out --role",
        )  # fmt: skip
    if config.role == "prefill" and not config.kv_offload:
        raise ConfigError(
            "a prefill engine offers its blocks from host memory", expected="--kv-offload", got="none",
            remedy="give it room for the prompts that are computed together, as --kv-offload 4GiB",
        )  # fmt: skip
    if config.role == "decode" and not config.prefill_peers:
        raise ConfigError("a decode engine needs the addresses of prefill engines", where="prefill_peers")


@contextlib.contextmanager
def tiers_of_rank(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    groups: Sequence[GroupLayout],
    path: Path,
    at: TensorRank,
    pinned: PinnedMemory | None = None,
) -> Iterator[OpenTiers]:
    """Opens the tiers for the runner that the context makes; closes them where that fails.

    There are none without a prefix cache. Raises ConfigError.
    """
    check_role(config, scheduler)
    tiers = OpenTiers()
    if has_tiers_or_peers(config) and scheduler.prefix_cache:
        from pegainfer.app.tier_stores import open_tiers

        tiers = open_tiers(config, groups, path, at, pinned)
    try:
        yield tiers
    except BaseException:
        tiers.close()
        raise
