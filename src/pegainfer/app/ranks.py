"""Groups of ranks. So far only the null device has more than one."""

from __future__ import annotations

import dataclasses

from pegainfer.contract.step import Runner
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.part import DataRank


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
