"""The scheduler: a pure state machine that brings computed tokens up to known tokens, step by step.

There is no prefill phase and no decode phase. Each plan walks the running sequences in order of rank, gives
each the row that brings it closer to its known tokens, then admits from the queue into what is left
(`planner`). Time comes in as an argument; nothing here touches a device.

A rank is fixed when a request arrives, and nobody starves (`admission`). The best-ranked sequence may take
blocks from all others, so there is no deadlock. Among several tenants the one that was served least is next
(`fairness`); how much prefill a step with decode rows takes is what the latency target leaves at measured
prices (`cost`).
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from pegainfer.contract.adapter import AdapterInfo, AdapterLoad
from pegainfer.contract.errors import InvariantError, PegaError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Constraint, RunnerInfo, StepPlan, StepResult
from pegainfer.engine.admission import Admission
from pegainfer.engine.batch import Batch, merged
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.cost import StepCost, StepLoad, load_of
from pegainfer.engine.data_rank import DataRankState
from pegainfer.engine.early_ends import EarlyEnds
from pegainfer.engine.outcomes import Outcomes
from pegainfer.engine.peering import Peering
from pegainfer.engine.planner import Planner
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import Sequence, Status
from pegainfer.engine.stats import scheduler_stats

if TYPE_CHECKING:
    from pegainfer.contract.kv_events import KVEventSink

__all__ = ["Scheduler", "SchedulerConfig"]


class _Flight(NamedTuple):
    """A plan that is not committed yet."""

    plan: StepPlan
    seqs: list[Sequence]  # of its rows
    load: StepLoad | None  # where its time is worth to be known
    prefill_tokens: int
    decode_rows: int
    decode_tokens: int  # positions that the decode rows compute
    launched: float  # seconds


class Scheduler:
    """Implements contract.step.StepPolicy. Not thread safe."""

    def __init__(
        self, info: RunnerInfo, config: SchedulerConfig | None = None, rng: random.Random | None = None
    ) -> None:
        """Raises ConfigError where the runner cannot hold one sequence.

        Args:
            rng: of the seeds that requests leave open; seeded by the configuration where it is not given.
        """
        self.info = info
        self.config = config or SchedulerConfig()
        self._cost = StepCost()
        self._residents = Residents(info, self.config, self._cost)
        self._tenants = self._residents.tenants
        target = self.config.target_itl_ms
        self._planner = Planner(self._residents, info, self._cost, target / 1e3 if target else None)
        self._outcomes = Outcomes(self._residents)
        self._live = self._outcomes.live
        self._counters = self._outcomes.counters
        rng = rng or random.Random(self.config.seed)
        self._admission = Admission(info, self.config, self._residents, self._outcomes, rng)
        self._early_ends = EarlyEnds(self.config, self._outcomes)
        self.peering = Peering(
            self._residents, info, self.config.peer_min_tokens, self.add, self.cancel, self._live
        )
        self._max_prefill = min(info.max_tokens, self.config.max_prefill_tokens or info.max_tokens)
        self._flight: deque[_Flight] = deque()
        # Sequences of the last plan's rows if each row sampled after one known token; those rows' drafts.
        self._decoding: list[Sequence] = []
        self._decoding_drafts: list[int] = []
        self._step = 0

    def publish_kv_events(self, sink: KVEventSink) -> None:
        """See contract.kv_events.KVEventPolicy."""
        self._outcomes.publish_kv_events(sink)

    def close(self) -> None:
        """See contract.closing.Closing."""
        self._outcomes.close()

    # The door

    def add(
        self, request: GenerateRequest, now: float, matcher: Matcher | None = None, ready: float = 0.0
    ) -> None:
        """Queues a request. See StepPolicy."""
        family = self._admission.admit(request, now, matcher)
        for seq in family:
            seq.ready = ready or now
        self._outcomes.open(family)
        self._early_ends.watch(family, now)
        self._queue(family)

    def _queue(self, family: list[Sequence]) -> None:
        """Children wait for their parent's prefill where there is anything of it to share."""
        parent = family[0]
        waiting = self._residents.waiting
        waiting.add(parent)
        self._residents.tiering.queue(parent)
        if parent.num_prompt == 1 or parent.limit == parent.num_prompt:  # nothing to share before the fork
            for child in family[1:]:
                waiting.add(child)
        else:
            parent.children = family[1:]
            for child in parent.children:
                child.status = Status.HELD
        self.peering.queue(parent)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request's sequences, or the one of `index`, at the next `schedule`; unknown ids are ignored.

        Index 0 alone goes on until the others are forked from it.
        """
        self._early_ends.cancel(request_id, index)

    def add_adapter(self, info: AdapterInfo) -> None:
        self._residents.adapters.add(info)

    def drop_adapter(self, name: str) -> bool:
        return self._residents.adapters.drop(name)

    def take_adapter_loads(self) -> list[AdapterLoad]:
        return self._residents.take_adapter_loads()

    def end_adapter_load(self, index: int, error: PegaError | None, now: float) -> list[TokenEvent]:
        return self._outcomes.end_adapter_load(index, error, now)

    def take_unloaded_adapters(self) -> list[AdapterInfo]:
        return self._residents.adapters.take_unloaded(self._residents.retired)

    def reset_prefix_cache(self) -> None:
        for home in self._residents.homes:
            home.kv.reset_prefix_cache()
        self.peering.reset()

    def has_work(self) -> bool:
        return bool(self._live or self._flight or self._residents.tiering.has_work or self.peering.is_pending)

    # A step

    def schedule(self, now: float) -> tuple[StepPlan | None, list[TokenEvent]]:
        """The next plan, None if nothing can be done before the next commit, and events of what ended."""
        events: list[TokenEvent] = []
        self._early_ends.apply(now, events)
        residents = self._residents
        tiering = residents.tiering
        tiering.now = now
        if len(self._flight) >= self.config.pipeline_depth or not self.has_work():
            return None, events
        info, batches = self.info, []
        for home in residents.homes:
            batches.append(
                Batch(self._step + 1, home, info.max_tokens, self._max_prefill, self._drafts(home))
            )
        if info.tiers:
            self.peering.pull(batches[0])
        self._planner.fill(batches)
        if info.tiers:
            self.peering.serve()
            tiering.start_saves(batches)
            self.peering.serve()
        batch = batches[0] if len(batches) == 1 else merged(batches)
        batch.reset_tiers = tiering.take_reset()
        if not (batch.decodes or batch.prefills or batch.transfers or batch.reset_tiers):
            if self._flight or not (self._live or tiering.in_flight):
                return None, events
            if not tiering.in_flight:
                if residents.adapters.is_loading or self.peering.awaits_peers():
                    return None, events
                raise InvariantError("no sequence can make progress and nothing is in flight")
        self._step = batch.step
        plan, seqs = batch.build(residents.frees, self._repeats(batch))
        # Ranks work side by side: the one with the most to do sets how long the step takes.
        load = batch.load() if len(batches) == 1 else max(batches, key=lambda b: b.budget - b.left).load()
        self._decoding = [] if batch.prefills else seqs
        if self.info.max_commit > 1:
            self._decoding_drafts = [row.drafts for row in batch.decodes]
        residents.frees.clear()
        flight = _Flight(plan, seqs, load, batch.prefill_tokens, len(batch.decodes), batch.decode_tokens, now)
        self._flight.append(flight)
        if batch.news:
            self._note_admissions(plan, seqs, now)
        return plan, events

    def _repeats(self, batch: Batch) -> bool:
        """Whether the batch has the last plan's rows again, each at its last known token."""
        if batch.prefills or batch.news or not batch.decodes or self._outcomes.num_constrained:
            return False
        if batch.decode_seqs != self._decoding:
            return False
        return self.info.max_commit == 1 or [row.drafts for row in batch.decodes] == self._decoding_drafts

    def _drafts(self, home: DataRankState) -> int:
        """Drafts that each decode row of a rank may have, so that the budget suffices for every sequence."""
        most = self.info.max_commit - 1
        if not most:
            return 0
        rows = len(home.running) or 1
        return max(0, min(most, self.info.max_tokens // rows - 1))

    def constrained(self) -> dict[int, Constraint]:
        """Rows of the newest uncommitted plan whose tokens a grammar bounds; see StepPolicy."""
        if not self._flight or not self._outcomes.num_constrained:
            return {}
        plan, seqs = self._flight[-1][:2]
        return {
            i: Constraint(seq.matcher, not seq.request.sampling.ignore_eos)
            for i, (row, seq) in enumerate(zip(plan.rows, seqs, strict=True))
            if row.sample and seq.matcher is not None and seq.status is not Status.FINISHED
        }

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes the oldest uncommitted plan's result."""
        if not self._flight or self._flight[0].plan is not plan:
            raise InvariantError(f"plan {plan.step} is not the oldest uncommitted one")
        flight = self._flight.popleft()
        if flight.load is not None:
            price, _ = self._cost.price(flight.load)
            if price > 0.0 and result.seconds > 0.0:
                self._counters.priced(result.seconds / price)
            self._cost.observe(flight.load, result.seconds)
        # Launched while the step before still ran, it began when that one ended.
        seconds = now - max(flight.launched, self._counters.last_step)
        self._tenants.note_step(flight.prefill_tokens, flight.decode_rows, seconds)
        if plan.rows:
            self._counters.step(flight.prefill_tokens, flight.decode_tokens, result.seconds, now)
        return self._outcomes.commit(plan, flight.seqs, result, now)

    def _note_admissions(self, plan: StepPlan, seqs: list[Sequence], now: float) -> None:
        """First admissions: the time, and what the prefix cache gave."""
        slots = {new.slot for new in plan.news}
        counters = self._counters
        for row, seq in zip(plan.rows, seqs, strict=True):
            if row.slot not in slots or seq.entered:
                continue
            seq.entered = True
            seq.scheduled = now
            if seq.index:
                continue  # a prompt counts once, with its first continuation
            counters.prompt_tokens += seq.num_prompt
            if self.config.prefix_cache and seq.may_use_prefix:
                counters.prefix_queries += seq.num_prompt
                counters.prefix_hits += seq.num_cached
                counters.cached_tokens += seq.num_cached

    # What others may see

    def price(self, plan: StepPlan) -> tuple[float, float]:
        """See StepPolicy. Ranks work side by side: the one with the most to do sets the price."""
        ranks = self.info.data_ranks
        if ranks == 1:
            return self._cost.price(load_of(plan.rows))
        parts = [[r for r in plan.rows if self.info.rank_of(r.slot) == rank] for rank in range(ranks)]
        return max(map(self._cost.price, map(load_of, parts)))

    def stats(self) -> EngineStats:
        """A snapshot; what only the loop knows (host seconds) is left to it."""
        live = sum(map(len, self._live.values()))
        return scheduler_stats(self._residents, self._counters, live, len(self._flight))

    def check_integrity(self) -> None:
        """Raises InvariantError if any container is inconsistent, or a live sequence is in no queue."""
        self._residents.check_integrity()
        residents = self._residents
        running = [home.running.items for home in residents.homes]
        queues: tuple[list[Sequence], ...] = (*running, residents.waiting.items, residents.loading.items)
        queued = {id(seq) for queue in queues for seq in queue}
        held = {id(child) for queue in queues for s in queue for child in s.children}
        live = {id(seq) for family in self._live.values() for seq in family}
        if queued & held or queued | held != live:
            raise InvariantError(f"{len(live)} live sequences, {len(queued)} in queues, {len(held)} held")
        flying = Counter(id(seq) for flight in self._flight for seq in flight.seqs)
        for family in self._live.values():
            for seq in family:
                rows, most = flying[id(seq)], self.info.max_commit
                if seq.flying != rows or not 0 <= seq.uncommitted <= rows * most:
                    raise InvariantError(f"sequence {seq.number} has lost count of its rows in flight")
