"""Which of several tensor-parallel ranks a weight, a config or a program is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from pegainfer.contract.errors import ConfigError

C = TypeVar("C")


class TensorRank(NamedTuple):
    """One of `ranks` tensor-parallel ranks, which have a shard of each divided weight."""

    rank: int = 0
    ranks: int = 1


ONE_RANK = TensorRank()
# What ranks divide evenly: fields of a config, and what they count.
HEADS = {"num_heads": "query heads"}
DENSE = {**HEADS, "intermediate_size": "feed-forward units"}


def config_of_rank(config: C, ranks: int, shared_out: Mapping[str, str] = DENSE) -> C:
    """The sizes of one of `ranks` tensor-parallel ranks.

    Beyond the number of KV heads, ranks have one each, and neighbours the same one.

    Args:
        config: a dataclass; `num_kv_heads` is divided as well where it has such a field.
        shared_out: fields that ranks divide evenly, with what they count, for the error.

    Raises ConfigError where a field does not divide.
    """
    if ranks == 1:
        return config
    sizes = {field: getattr(config, field) for field in shared_out}
    groups = getattr(config, "num_kv_heads", ranks)
    if any(size % ranks for size in sizes.values()) or (groups % ranks and ranks % groups):
        expected = "a divisor of " + " and of ".join(f"{sizes[f]} {what}" for f, what in shared_out.items())
        if hasattr(config, "num_kv_heads"):
            expected += f", and a divisor or a multiple of {groups} KV heads"
        raise ConfigError(
            "this model does not divide among so many ranks",
            expected=expected,
            got=ranks,
            where="tensor_parallel_size",
        )
    own = {field: size // ranks for field, size in sizes.items()}
    if hasattr(config, "num_kv_heads"):
        own["num_kv_heads"] = max(1, groups // ranks)
    return dataclasses.replace(config, **own)  # type: ignore[type-var]
