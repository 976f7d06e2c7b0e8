"""Which of several tensor-parallel ranks a weight, a config or a program is for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import msgspec

from pegainfer.contract.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)
NO_EXPERTS: Mapping[str, str] = MappingProxyType({})


class TensorRank(NamedTuple):
    """One of `ranks` tensor-parallel ranks, which have a shard of each divided weight.

    `whole_experts`: each rank has some experts of a mixture (expert parallelism), not a share of every one.
    """

    rank: int = 0
    ranks: int = 1
    whole_experts: bool = False


ONE_RANK = TensorRank()
# What ranks divide evenly: fields of a config, and what they count.
HEADS = {"num_heads": "query heads"}
DENSE = {**HEADS, "intermediate_size": "feed-forward units"}


def config_of_rank(
    config: C, at: TensorRank, shared_out: Mapping[str, str] = DENSE, experts: Mapping[str, str] = NO_EXPERTS
) -> C:
    """The sizes of one of several tensor-parallel ranks.

    Beyond the number of KV heads, ranks have one each, and neighbours the same one.

    Args:
        config: of a line; `num_kv_heads` is divided as well where it has such a field.
        shared_out: fields that ranks divide evenly, with what they count, for the error.
        experts: those of routed experts, which ranks with whole experts do not divide: these set
            `first_expert` and `held_experts`.

    Raises ConfigError where a field does not divide, or where there are no experts to place.
    """
    if at.whole_experts and (not experts or at.ranks == 1):
        raise ConfigError(
            "no experts can be placed on ranks", expected="a mixture of experts, and several ranks",
            got="one rank" if experts else "a model without experts", where="enable_expert_parallel",
        )  # fmt: skip
    if at.ranks == 1:
        return config
    divided = dict(shared_out) | ({"num_experts": "experts"} if at.whole_experts else dict(experts))
    sizes = {field: getattr(config, field) for field in divided}
    groups, ranks = getattr(config, "num_kv_heads", at.ranks), at.ranks
    if any(size % ranks for size in sizes.values()) or (groups % ranks and ranks % groups):
        expected = "a divisor of " + " and of ".join(f"{sizes[f]} {what}" for f, what in divided.items())
        if hasattr(config, "num_kv_heads"):
            expected += f", and a divisor or a multiple of {groups} KV heads"
        raise ConfigError(
            "this model does not divide among so many ranks", expected=expected, got=ranks,
            where="tensor_parallel_size",
        )  # fmt: skip
    own = {field: size // ranks for field, size in sizes.items()}
    if hasattr(config, "num_kv_heads"):
        own["num_kv_heads"] = max(1, groups // ranks)
    if at.whole_experts:
        held = own.pop("num_experts")  # the router chooses among all
        own |= {"first_expert": at.rank * held, "held_experts": held}
    return msgspec.structs.replace(config, **own)
