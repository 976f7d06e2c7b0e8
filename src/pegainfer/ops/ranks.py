"""Which of several tensor-parallel ranks a weight, a config or a program is for."""

from __future__ import annotations

from typing import NamedTuple

from pegainfer.contract.errors import UnsupportedError


class TensorRank(NamedTuple):
    """One of `ranks` tensor-parallel ranks, which have a shard of each divided weight."""

    rank: int = 0
    ranks: int = 1


ONE_RANK = TensorRank()


def refuse_ranks(line: str, at: TensorRank) -> None:
    """For a line whose weights are not divided. Raises UnsupportedError for more than one rank."""
    if at.ranks > 1:
        raise UnsupportedError(
            f"the {line} line has no tensor parallelism",
            expected=1,
            got=at.ranks,
            where="tensor_parallel_size",
        )
