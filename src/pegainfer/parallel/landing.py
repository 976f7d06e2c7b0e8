"""Transfers of a group: one has ended when it has ended on every rank that takes part in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pegainfer.contract.errors import EngineDeadError
from pegainfer.contract.step import StepResult
from pegainfer.contract.tiers import Transfer


class GroupTransfers:
    """Transfers in flight, each with the ranks where it has not ended yet.

    One that failed on any rank has failed, but is not reported before the others have ended it: until then
    they read its source and write its target.
    """

    def __init__(self, num_ranks: int, data_ranks: int) -> None:
        self._share = num_ranks // data_ranks  # ranks that take part in a transfer
        self._open: dict[int, set[int]] = {}
        self._reasons: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def start(self, transfers: Iterable[Transfer]) -> None:
        """A plan with these transfers is broadcast."""
        for t in transfers:
            self._open[t.id] = set(range(t.rank * self._share, (t.rank + 1) * self._share))

    def collect(self, results: Sequence[StepResult]) -> tuple[tuple[int, ...], dict[int, str]]:
        """Takes one result of each rank; ids that have landed on all ranks, and those that have failed.

        Raises EngineDeadError where a rank ends a transfer that it is not doing.
        """
        ended: list[int] = []
        for rank, result in enumerate(results):
            for transfer in (*result.landed, *result.failed):
                ranks = self._open.get(transfer, set())
                if rank not in ranks:
                    raise EngineDeadError(
                        f"rank {rank} has ended transfer {transfer}, which it was not doing",
                        where=f"step {result.step}",
                    )
                ranks.discard(rank)
                if transfer in result.failed:
                    self._reasons.setdefault(transfer, f"rank {rank}: {result.failed[transfer]}")
                if not ranks:
                    del self._open[transfer]
                    ended.append(transfer)
        failed = {transfer: self._reasons.pop(transfer) for transfer in ended if transfer in self._reasons}
        return tuple(transfer for transfer in ended if transfer not in failed), failed
