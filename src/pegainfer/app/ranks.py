"""Groups of ranks: on the null device in this process; on CPU and GPUs a process each beside rank 0 here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pegainfer.app.config import EngineConfig
from pegainfer.app.rank_process import RankOrder
from pegainfer.app.tiers import has_tiers_or_peers
from pegainfer.contract.errors import PeerFailedError
from pegainfer.contract.step import Runner, RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.part import DataRank
from pegainfer.parallel.process import END_SECONDS, RankProcess
from pegainfer.runtime.rank_memory import WAIT_SECONDS, RankMemory

COMMAND = (sys.executable, "-m", "pegainfer.app.rank_process")  # starts a rank


def null_ranks(config: NullConfig, tensor_ranks: int = 1, data_ranks: int = 1) -> Runner:
    """A null device, or a group of them.

    Args:
        config: of each rank.
        tensor_ranks: ranks that compute the same rows.
        data_ranks: groups of these with pools and slots of their own.
    """
    if tensor_ranks * data_ranks == 1:
        return NullRunner(config)
    ranks: list[Runner] = []
    for data_rank in range(data_ranks):
        for _ in range(tensor_ranks):
            runner = NullRunner(dataclasses.replace(config, rank=len(ranks)))
            ranks.append(runner if data_ranks == 1 else DataRank(runner, data_rank, data_ranks))
    return RankGroup(ranks)


def rank_processes(
    build: Callable[[RankMemory, Callable[[RunnerInfo], None]], Runner],
    files: tuple[Path, Path | None],
    groups: Sequence[GroupLayout],
    config: EngineConfig,
    scheduler: SchedulerConfig,
) -> RankGroup:
    """Tensor-parallel ranks. They load at the same time, each its own part.

    Args:
        build: makes rank 0, in this process, from the group's memory. It calls its other argument with the
            bounds of every rank as soon as it knows them, which starts the other ranks.
        files: the model's path, and that of the tokenizer that takes the place of its own.
        groups: of each rank.
        config: with the number of ranks, and of each rank's threads.

    Raises what a rank raises; no process is left then.
    """
    memory = RankMemory.create(config.tensor_parallel_size, WAIT_SECONDS)
    others: list[RankProcess] = []

    def start(info: RunnerInfo) -> None:
        if scheduler.prefix_cache and has_tiers_or_peers(config):
            from pegainfer.app.tier_stores import planned_tiers

            info = msgspec.structs.replace(info, tiers=planned_tiers(config, groups, memory.ranks))
        order = RankOrder(
            path=str(files[0]),
            tokenizer=str(files[1] or ""),
            ranks=memory.ranks,
            slots=info.max_slots,
            length=info.max_model_len,
            num_blocks=info.num_blocks,
            engine=config,
            scheduler=scheduler,
            wait_seconds=memory.seconds,
        )
        for rank in range(1, memory.ranks):
            text = msgspec.json.encode(dataclasses.replace(order, rank=rank)).decode()
            others.append(RankProcess(COMMAND, text, rank, info, memory))

    first: Runner | None = None
    try:
        try:
            first = build(memory, start)
        except PeerFailedError as error:
            raise _own_error(others) or error from None
        for other in others:
            other.wait_ready()
        return RankGroup([first, *others], memory.fail)
    except BaseException:
        for started in (*others, *([first] if first is not None else [])):
            started.close()
        memory.close()
        raise


def _own_error(others: Sequence[RankProcess]) -> Exception | None:
    """Why a rank did not become ready; None where each only misses another one."""
    for other in others:
        try:
            other.wait_ready(END_SECONDS)
        except (PeerFailedError, TimeoutError):
            continue
        except Exception as error:
            return error
    return None
