"""Groups of ranks: on the null device in this process; on the CPU a process each beside rank 0 here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from pegainfer.app.config import EngineConfig
from pegainfer.app.rank_process import RankOrder
from pegainfer.contract.step import Runner, RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.part import DataRank
from pegainfer.parallel.process import RankProcess
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


def cpu_ranks(
    build: Callable[[RankMemory], Runner],
    files: tuple[Path, Path | None],
    info: RunnerInfo,
    config: EngineConfig,
    scheduler: SchedulerConfig,
) -> RankGroup:
    """Tensor-parallel ranks. They load at the same time, each its own part.

    Args:
        build: makes rank 0, in this process.
        files: the model's path, and that of the tokenizer that takes the place of its own.
        info: the bounds of every rank.
        config: with the number of ranks, and of each rank's threads.

    Raises what a rank raises; no process is left then.
    """
    memory = RankMemory.create(config.tensor_parallel_size, WAIT_SECONDS)
    order = RankOrder(
        path=str(files[0]),
        tokenizer=str(files[1] or ""),
        ranks=config.tensor_parallel_size,
        slots=info.max_slots,
        length=info.max_model_len,
        num_blocks=info.num_blocks,
        engine=config,
        scheduler=scheduler,
        wait_seconds=memory.seconds,
    )
    ranks: list[Runner] = []
    try:
        for rank in range(1, memory.ranks):
            text = msgspec.json.encode(dataclasses.replace(order, rank=rank)).decode()
            ranks.append(RankProcess(COMMAND, text, rank, info, memory))
        ranks.insert(0, build(memory))
        for other in ranks[1:]:
            assert isinstance(other, RankProcess)
            other.wait_ready()
        return RankGroup(ranks, memory.fail)
    except BaseException:
        for started in ranks:
            started.close()
        memory.close()
        raise
