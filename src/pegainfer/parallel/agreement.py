"""What the ranks of a group must have in common: their bounds, and the results of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.contract.step import RunnerInfo, StepResult

# Of a result, what is the same on every rank that computed the same rows: not times, nor when transfers end.
COMPARED = ("step", "tokens", "errors", "error_kinds", "logprobs", "prompt_logprobs", "pooled")
SHOWN = 80  # characters of a value in an error message


def common_info(infos: Sequence[RunnerInfo]) -> RunnerInfo:
    """Bounds that every rank can keep: of each pool, as many blocks as the smallest rank has.

    Of what tiers have stored, rank 0's word counts: where another rank lacks a block, its load fails.

    Raises ConfigError where the ranks differ in anything else, or cannot be divided evenly.
    """
    first = infos[0]
    if len(infos) % first.data_ranks or first.max_slots % first.data_ranks:
        raise ConfigError(
            "ranks and slots cannot be divided among the data-parallel ranks",
            expected=f"multiples of {first.data_ranks}",
            got=f"{len(infos)} ranks and {first.max_slots} slots",
        )
    for rank, info in enumerate(infos):
        for name in RunnerInfo.__struct_fields__:
            values = [_comparable(name, getattr(one, name)) for one in (first, info)]
            if values[0] != values[1]:
                raise ConfigError(
                    f"the ranks of a group differ in {name}",
                    expected=f"rank 0's {_shown(getattr(first, name))}",
                    got=f"rank {rank}'s {_shown(getattr(info, name))}",
                )
    tiers = tuple(
        msgspec.structs.replace(tier, num_blocks=_smallest([info.tiers[i].num_blocks for info in infos]))
        for i, tier in enumerate(first.tiers)
    )
    blocks = _smallest([info.num_blocks for info in infos])
    return msgspec.structs.replace(first, num_blocks=blocks, tiers=tiers)


def _comparable(name: str, value: Any) -> Any:
    """What must be equal of a field: sizes of pools need not be."""
    if name == "num_blocks":
        return len(value)
    return [(tier.kind, len(tier.num_blocks)) for tier in value] if name == "tiers" else value


def _smallest(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(min, zip(*counts, strict=True)))


def check_agreement(results: Sequence[StepResult], first_rank: int) -> None:
    """Raises EngineDeadError, which names rank, field and row, where tensor-parallel ranks differ.

    They hold parts of the same sequences, so after a difference no further step can be right.

    Args:
        results: of the ranks first_rank, first_rank + 1, …
    """
    first = results[0]
    for rank, result in enumerate(results[1:], first_rank + 1):
        for name in COMPARED:
            ours, theirs = getattr(first, name), getattr(result, name)
            if ours != theirs:
                row, ours, theirs = _first_difference(ours, theirs)
                raise EngineDeadError(
                    f"ranks disagree on {name}",
                    expected=f"rank {first_rank}'s {_shown(ours)}",
                    got=f"rank {rank}'s {_shown(theirs)}",
                    where=f"step {first.step}{row}",
                    remedy="restart the server",
                )


def _first_difference(a: Any, b: Any) -> tuple[str, Any, Any]:
    """The row, as an error message names it, and both values; without a row where there is none to blame."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        row = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        return f", row {row}", a[row], b[row]
    if isinstance(a, dict) and isinstance(b, dict):
        row = min(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        return f", row {row}", a.get(row), b.get(row)
    return "", a, b


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
