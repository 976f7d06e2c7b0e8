"""One runner in front of a group of ranks.

Every rank gets every plan, whole and frozen. Ranks of one data-parallel rank are tensor-parallel: they
compute the same rows, and their results must agree. Data-parallel ranks compute the rows of their own slots,
and their results are put together. A group is a Runner like any other, so the loop knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, InvariantError, ModelFileError, PeerFailedError
from pegainfer.contract.step import PendingStep, Preparing, Runner, RunnerInfo, StepPlan, StepResult
from pegainfer.parallel.agreement import check_agreement, common_info
from pegainfer.parallel.landing import GroupTransfers
from pegainfer.parallel.part import adapter_runner, rows_of

T = TypeVar("T")


class _Flight(NamedTuple):
    """A plan that every rank has started, with each rank's own handle."""

    plan: StepPlan
    handles: list[Any]


class RankGroup:
    """Implements contract.step.Runner, Preparing, AdapterRunner and RankedRunner over runners of one rank."""

    def __init__(
        self, ranks: Sequence[Runner], on_failure: Callable[[int], object] = lambda rank: None
    ) -> None:
        """Takes the runners over. Raises ConfigError where they do not fit together.

        Args:
            ranks: each says in its `info` how many data-parallel ranks there are. The tensor-parallel ranks
                of a data-parallel rank stand side by side.
            on_failure: called with a rank that failed before the others are waited for, so that they do not
                wait for it.
        """
        self.ranks = tuple(ranks)
        self._on_failure = on_failure
        self._info = common_info([rank.info for rank in ranks])
        self._share = len(self.ranks) // self._info.data_ranks  # tensor-parallel ranks
        self._transfers = GroupTransfers(len(self.ranks), self._info.data_ranks)
        self._seconds = (0.0,) * len(self.ranks)  # of each rank in steps

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def rank_seconds(self) -> tuple[float, ...]:
        """See RankedRunner."""
        return self._seconds

    def forward(self, plan: StepPlan) -> _Flight:
        """Broadcasts the plan; every rank starts its forward pass."""
        self._transfers.start(plan.transfers)
        calls = [partial(rank.forward, plan) for rank in self.ranks]
        return _Flight(plan, self._on_all(plan, calls, others_first=True))

    def sample(self, handle: _Flight, masks: dict[int, bytes] | None = None) -> PendingStep:
        """Every rank starts sampling with the same masks."""
        calls = zip(self.ranks, handle.handles, strict=True)
        starts = [partial(rank.sample, own, masks) for rank, own in calls]
        pending = self._on_all(handle.plan, starts, others_first=True)
        return _GroupStep(pending, partial(self._result, handle.plan, pending))

    def _on_all(
        self, plan: StepPlan, calls: Sequence[Callable[[], T]], *, others_first: bool = False
    ) -> list[T]:
        """What the calls return, one a rank. If all fail, the step has failed; if some do, the engine has.

        Args:
            others_first: rank 0, which runs in this process, is called when the others have their messages.
        """
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        ranks = range(len(calls))
        for rank in reversed(ranks) if others_first else ranks:
            try:
                results[rank] = calls[rank]()
            except Exception as error:
                errors[rank] = error
                self._on_failure(rank)
        if not errors:
            return [results[rank] for rank in ranks]
        errors = dict(sorted(errors.items()))
        own = {r: e for r, e in errors.items() if not isinstance(e, PeerFailedError)} or errors
        rank, first = next(iter(own.items()))
        fatal = [e for e in own.values() if isinstance(e, EngineDeadError | InvariantError)]
        if fatal or len(own) == len(calls):
            # A rank that is gone explains what another one found in the wrong order since.
            gone = (e for e in fatal if isinstance(e, EngineDeadError))
            raise next(gone, fatal[0] if fatal else first)
        raise EngineDeadError(
            f"rank {rank} failed where others did not: {type(first).__name__}: {first}",
            where=f"step {plan.step}",
            remedy="restart the server",
        ) from first

    def _result(self, plan: StepPlan, pending: Sequence[PendingStep]) -> StepResult:
        """Waits for all ranks and makes one result of theirs. Raises EngineDeadError where they disagree."""
        results = self._on_all(plan, [step.wait for step in pending])
        self._seconds = tuple(s + r.seconds for s, r in zip(self._seconds, results, strict=True))
        share = self._share
        for first in range(0, len(results), share):
            check_agreement(results[first : first + share], first)
        landed, failed = self._transfers.collect(results) if self._transfers else ((), {})
        return msgspec.structs.replace(
            self._merged(plan, results[::share]),
            seconds=max(result.seconds for result in results),
            stage_seconds=max(result.stage_seconds for result in results),
            landed=landed,
            failed=failed,
        )

    def _merged(self, plan: StepPlan, results: Sequence[StepResult]) -> StepResult:
        """One result of those of all data-parallel ranks, by row of the whole plan."""
        if len(results) == 1:
            return results[0]
        tokens: list[tuple[int, ...]] = [()] * len(plan.rows)
        fields: dict[str, dict[int, Any]] = {
            name: {} for name in ("logprobs", "prompt_logprobs", "pooled", "errors", "error_kinds")
        }
        for data_rank, result in enumerate(results):
            rows = rows_of(plan, self._info, data_rank)
            if result.step != plan.step or len(result.tokens) != len(rows):
                raise EngineDeadError(
                    "a rank's result does not fit the plan",
                    expected=f"{len(rows)} rows of step {plan.step}",
                    got=f"{len(result.tokens)} of step {result.step}",
                    where=f"rank {data_rank * self._share}",
                )
            for row, new in zip(rows, result.tokens, strict=True):
                tokens[row] = new
            for name, merged in fields.items():
                merged.update((rows[i], value) for i, value in getattr(result, name).items())
        return msgspec.structs.replace(StepResult(step=plan.step, tokens=tuple(tokens)), **fields)

    def prepare(self) -> bool:
        """See Preparing. All ranks make the same thing ready."""
        return any([rank.prepare() for rank in self.ranks if isinstance(rank, Preparing)])

    # Adapters; see AdapterRunner

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, list[Any]]:
        """Each rank reads its own part. Raises PegaError, also where the files changed meanwhile."""
        with ThreadPoolExecutor(len(self.ranks), "adapters") as pool:
            read = list(pool.map(lambda rank: adapter_runner(rank).read_adapter(name, path), self.ranks))
        infos = [info for info, _ in read]
        if any(info != infos[0] for info in infos):
            raise ModelFileError("the adapter's files changed while the ranks read them", where=path)
        return infos[0], [adapter for _, adapter in read]

    def install_adapter(self, index: int, adapter: list[Any]) -> None:
        """Installs on every rank, or on none where one of them refuses."""
        installed = []
        try:
            for rank, own in zip(self.ranks, adapter, strict=True):
                adapter_runner(rank).install_adapter(index, own)
                installed.append(rank)
        except BaseException:
            for rank in installed:
                adapter_runner(rank).remove_adapter(index)
            raise

    def remove_adapter(self, index: int) -> None:
        for rank in self.ranks:
            adapter_runner(rank).remove_adapter(index)

    def close(self) -> None:
        """Closes every rank, then raises the first error.

        The first rank, whose memory the others may write to, is the last.
        """
        errors: list[Exception] = []
        for rank in reversed(self.ranks):
            try:
                rank.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class _GroupStep:
    """A step under way on every rank."""

    def __init__(self, pending: Sequence[PendingStep], result: Callable[[], StepResult]) -> None:
        self._pending = pending
        self._result = result

    def done(self) -> bool:
        return all(step.done() for step in self._pending)

    def wait(self) -> StepResult:
        """Blocks until every rank has ended the step."""
        return self._result()
