"""One data-parallel rank's part of a plan, for a runner that knows no other ranks."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.contract.adapter import AdapterInfo, AdapterRunner
from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import PendingStep, Preparing, Row, Runner, RunnerInfo, StepPlan


def rows_of(plan: StepPlan, info: RunnerInfo, data_rank: int) -> list[int]:
    """Places in the plan of the rows whose slots live on a data-parallel rank, ascending."""
    return [i for i, row in enumerate(plan.rows) if info.rank_of(row.slot) == data_rank]


def part_of(plan: StepPlan, info: RunnerInfo, data_rank: int, rows: list[int]) -> StepPlan:
    """What a plan says of one data-parallel rank, whose slots are numbered from 0 in it.

    Args:
        info: of the group.
        rows: from `rows_of`. A plan without any is a step, too: steps count up by one on every rank.
    """
    first = info.max_slots // info.data_ranks * data_rank
    replace = msgspec.structs.replace
    kept = [plan.rows[i] for i in rows]
    return StepPlan(
        step=plan.step,
        frees=tuple(slot - first for slot in plan.frees if info.rank_of(slot) == data_rank),
        news=tuple(
            replace(new, slot=new.slot - first) for new in plan.news if info.rank_of(new.slot) == data_rank
        ),
        blocks=tuple(
            replace(part, slot=part.slot - first)
            for part in plan.blocks
            if info.rank_of(part.slot) == data_rank
        ),
        copies=tuple(copy for copy in plan.copies if copy.rank == data_rank),
        reset_tiers=plan.reset_tiers,
        transfers=tuple(transfer for transfer in plan.transfers if transfer.rank == data_rank),
        rows=tuple(Row(r.slot - first, r.start, r.count, r.sample, r.follow, r.drafts) for r in kept),
        snapshots=tuple(
            replace(snapshot, slot=snapshot.slot - first)
            for snapshot in plan.snapshots
            if info.rank_of(snapshot.slot) == data_rank
        ),
        repeats=plan.repeats and bool(rows),
        wait_transfers=plan.wait_transfers,
    )


def adapter_runner(runner: Runner) -> AdapterRunner:
    """The runner, if it takes adapters. Raises UnsupportedError."""
    if not isinstance(runner, AdapterRunner):
        raise UnsupportedError("this rank serves no adapters", got=type(runner).__name__)
    return runner


class DataRank:
    """Makes a runner with pools and slots of its own one of several data-parallel ranks.

    It takes whole plans, hands its part of them to the runner, and gives results of the part's rows.
    """

    def __init__(self, runner: Runner, data_rank: int, data_ranks: int) -> None:
        """
        Args:
            runner: whose `info` speaks of this rank alone.
            data_rank: in [0, data_ranks).
        """
        self._runner = runner
        self._rank = data_rank
        alone = runner.info
        self._info = msgspec.structs.replace(
            alone, max_slots=alone.max_slots * data_ranks, data_ranks=data_ranks
        )

    @property
    def info(self) -> RunnerInfo:
        """Of all data-parallel ranks."""
        return self._info

    def forward(self, plan: StepPlan) -> tuple[list[int], Any]:
        """Starts the rank's part; see Runner."""
        rows = rows_of(plan, self._info, self._rank)
        return rows, self._runner.forward(part_of(plan, self._info, self._rank, rows))

    def sample(self, handle: tuple[list[int], Any], masks: dict[int, bytes] | None = None) -> PendingStep:
        """Starts sampling. `masks` are by row of the whole plan."""
        rows, inner = handle
        own = {i: masks[row] for i, row in enumerate(rows) if row in masks} if masks else None
        return self._runner.sample(inner, own)

    def prepare(self) -> bool:
        """See Preparing."""
        return isinstance(self._runner, Preparing) and self._runner.prepare()

    # Adapters; see AdapterRunner

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, Any]:
        return adapter_runner(self._runner).read_adapter(name, path)

    def install_adapter(self, index: int, adapter: Any) -> None:
        adapter_runner(self._runner).install_adapter(index, adapter)

    def remove_adapter(self, index: int) -> None:
        adapter_runner(self._runner).remove_adapter(index)

    def close(self) -> None:
        self._runner.close()
