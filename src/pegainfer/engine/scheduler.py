"""The scheduler: a pure state machine that brings computed tokens up to known tokens, step by step.

There is no prefill phase and no decode phase. Each plan walks the running sequences in order of rank, gives
each the row that brings it closer to its known tokens, then admits from the queue into what is left
(`planner`). Time comes in as an argument; nothing here touches a device.

Rank = priority + arrival / aging_seconds, fixed when a request arrives. All ranks age at the same rate, so
comparing these constants is comparing aged priorities: a request is overtaken only by what arrives soon
after and is more urgent, so nobody starves. The best-ranked sequence may take blocks from all others, so
there is no deadlock. Among several tenants the one that was served least is next (`fairness`); how much
prefill a step with decode rows takes is what the latency target leaves at measured prices (`cost`).

Long because it is the one face of all that: the work is done in planner, residents and outcomes.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pegainfer.contract.errors import (
    ConfigError,
    DeadlineError,
    InvariantError,
    PegaError,
    QueueFullError,
    RequestError,
)
from pegainfer.contract.event import EngineStats, FinishReason, TokenEvent
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.request import HASH_BYTES, GenerateRequest, hash_blocks, root_hash
from pegainfer.contract.step import Constraint, RunnerInfo, StepPlan, StepResult
from pegainfer.engine.batch import Batch
from pegainfer.engine.check import check_request
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.cost import StepCost, StepLoad
from pegainfer.engine.outcomes import Outcomes
from pegainfer.engine.planner import Planner
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import Sequence, Status

__all__ = ["Scheduler", "SchedulerConfig"]

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: multiples of it are spread evenly


def derived_seed(seed: int, index: int) -> int:
    """The seed of continuation `index`: that of index 0 is the request's own."""
    return (seed + index * GOLDEN) & MASK64


class _Flight(NamedTuple):
    """A plan that is not committed yet."""

    plan: StepPlan
    seqs: list[Sequence]  # of its rows
    load: StepLoad | None  # where its time is worth to be known
    prefill_tokens: int
    decode_rows: int
    launched: float  # seconds


class Scheduler:
    """Implements contract.step.StepPolicy. Not thread safe."""

    def __init__(
        self, info: RunnerInfo, config: SchedulerConfig | None = None, rng: random.Random | None = None
    ) -> None:
        self.info = info
        self.config = config or SchedulerConfig()
        self._rng = rng or random.Random(self.config.seed)
        self._residents = Residents(info, self.config)
        self._kv = self._residents.kv
        self._tenants = self._residents.tenants
        self._cost = StepCost()
        target = self.config.target_itl_ms
        self._planner = Planner(self._residents, info, self._cost, target / 1e3 if target else None)
        self._outcomes = Outcomes(self._residents)
        self._live = self._outcomes.live
        self._counters = self._outcomes.counters
        self._reach = self._kv.reach_alone(info.max_commit) + 1  # the last token's KV is never needed
        if self._reach < 2 or info.max_tokens < 1 or self._residents.num_slots < 1:
            raise ConfigError("the runner cannot hold one sequence", got=info)
        self._max_prefill = min(info.max_tokens, self.config.max_prefill_tokens or info.max_tokens)
        self._cancels: list[tuple[str, int | None]] = []
        self._instant: list[str] = []  # requests that ask for no token
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of ended requests are dropped late
        self._flight: deque[_Flight] = deque()
        self._decoding: list[Sequence] = []  # of the last plan's rows, if each was a token that follows
        self._step = 0
        self._next_number = 0

    # The door

    @property
    def block_size(self) -> int:
        """Tokens a block hash of a request must stand for."""
        return self._kv.unit

    def check(self, request: GenerateRequest) -> array[int]:
        """Raises what `add` would raise, and keeps nothing. Returns the prompt's ids."""
        tokens = check_request(request, self.info, self.config, self._kv.unit, self._reach)
        waiting = self._residents.waiting
        queued = waiting.num_tokens
        if len(waiting) >= self.config.max_waiting_requests or (
            queued and queued + len(tokens) > self.config.max_waiting_tokens
        ):
            most = f"{self.config.max_waiting_requests} requests and {self.config.max_waiting_tokens} tokens"
            raise QueueFullError(
                "the queue is full",
                expected=f"at most {most}",
                got=f"{len(waiting)} requests and {queued} tokens that wait",
                retry_after=self._counters.retry_after(len(waiting)),
                remedy="try again later",
            )
        return tokens

    def add(self, request: GenerateRequest, now: float, matcher: Matcher | None = None) -> None:
        """Queues a request. Raises RequestError, QueueFullError; nothing is kept in that case.

        Args:
            matcher: of the request's grammar where it has one; taken over.
        """
        try:
            tokens = self.check(request)
            if request.grammar is not None and matcher is None:
                raise RequestError(
                    "this engine has no grammar support", got=request.grammar.kind, param="grammar"
                )
            if request.id in self._live:
                raise RequestError("a live request has this id", got=request.id[:64], param="request_id")
        except PegaError:
            self._counters.rejections += 1
            raise
        sampling = request.sampling
        most = self.info.max_model_len if sampling.max_tokens is None else len(tokens) + sampling.max_tokens
        limit = min(most, self.info.max_model_len, self._reach)
        seed = self._rng.getrandbits(64) if sampling.seed is None else sampling.seed & MASK64
        rank = request.priority + now / self.config.aging_seconds
        hashes = self._hash(request)
        tenant = self._tenants.enter(request.tenant)
        family = [
            Sequence(
                request,
                tokens=array("i", tokens),
                hashes=hashes,
                number=self._next_number + index,
                index=index,
                seed=derived_seed(seed, index),
                limit=limit,
                rank=(rank, self._next_number + index),
                now=now,
                tenant=tenant,
                matcher=matcher if matcher is None or index == 0 else matcher.copy(),
            )
            for index in range(request.n)
        ]
        self._next_number += request.n
        self._outcomes.open(family)
        if request.deadline is not None:
            self._push_deadline(request.deadline, request.id)
        if self.config.max_wait_seconds:
            self._push_deadline(now + self.config.max_wait_seconds, request.id)
        if limit == len(tokens):
            self._instant.append(request.id)
        self._queue(family)

    def _queue(self, family: list[Sequence]) -> None:
        parent = family[0]
        waiting = self._residents.waiting
        waiting.add(parent)
        if parent.num_prompt == 1 or parent.limit == parent.num_prompt:  # nothing to share before the fork
            for child in family[1:]:
                waiting.add(child)
            return
        parent.children = family[1:]
        for child in parent.children:
            child.status = Status.HELD

    def _hash(self, request: GenerateRequest) -> list[bytes]:
        if not self.config.prefix_cache:
            return []
        raw = request.block_hashes
        if raw:
            return [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        parent = root_hash(request.adapter, request.cache_salt)
        return hash_blocks(request.prompt, self._kv.unit, parent=parent)

    def _push_deadline(self, deadline: float, request_id: str) -> None:
        if len(self._deadlines) > 64 + 2 * len(self._live):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._live]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request_id))

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends a request's sequences, or the one of `index`, at the next `schedule`; unknown ids are ignored.

        Index 0 alone goes on until the others are forked from it.
        """
        if request_id in self._live:
            self._cancels.append((request_id, index))

    def has_work(self) -> bool:
        return bool(self._live or self._flight)

    # A step

    def schedule(self, now: float) -> tuple[StepPlan | None, list[TokenEvent]]:
        """The next plan, None if nothing can be done before the next commit, and events of what ended."""
        events: list[TokenEvent] = []
        if self._cancels or self._instant or self._deadlines:
            self._end_early(now, events)
        residents = self._residents
        if len(self._flight) >= self.config.pipeline_depth or not (
            residents.running.items or residents.waiting.items
        ):
            return None, events
        batch = Batch(self._step + 1, self.info.max_tokens, self._max_prefill)
        self._planner.fill(batch)
        if not batch.decodes and not batch.prefills:
            if not self._flight:
                raise InvariantError("no sequence can make progress and no plan is in flight")
            return None, events
        self._step = batch.step
        plan, seqs = batch.build(residents.frees, self._repeats(batch))
        self._decoding = [] if batch.prefills else seqs
        residents.frees.clear()
        flight = _Flight(plan, seqs, batch.load(), batch.prefill_tokens, len(batch.decodes), now)
        self._flight.append(flight)
        if batch.news:
            self._note_admissions(plan, seqs, now)
        return plan, events

    def _repeats(self, batch: Batch) -> bool:
        """Whether the batch is the last plan's, a token on: each decode row has sampled one."""
        alone = not (batch.prefills or batch.news or self._outcomes.num_constrained)
        return alone and self.info.max_commit == 1 and batch.decode_seqs == self._decoding

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
            self._cost.observe(flight.load, result.seconds)
        # Launched while the step before still ran, it began when that one ended.
        seconds = now - max(flight.launched, self._counters.last_step)
        self._tenants.note_step(flight.prefill_tokens, flight.decode_rows, seconds)
        self._counters.step(flight.prefill_tokens, flight.decode_rows, result.seconds, now)
        return self._outcomes.commit(plan, flight.seqs, result, now)

    def _end_early(self, now: float, events: list[TokenEvent]) -> None:
        """Cancels, deadlines, and requests that ask for no token."""
        outcomes = self._outcomes
        cancels, self._cancels = self._cancels, []
        for request_id, index in cancels:
            if index is None:
                outcomes.end_request(request_id, FinishReason.ABORT, now, events)
            elif not outcomes.end_one(request_id, index, now, events):
                self._cancels.append((request_id, index))
        for request_id in self._instant:
            for seq in tuple(self._live.get(request_id, ())):
                if seq.prompt_logprobs is None or seq.num_prompt == 1:
                    events.append(outcomes.finish(seq, FinishReason.LENGTH, now))
        self._instant.clear()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            late = self._late(self._live.get(request_id, ()), deadline, now)
            if late is not None:
                outcomes.end_request(
                    request_id, FinishReason.ERROR, now, events, error=late, error_kind=DeadlineError.__name__
                )

    def _late(self, family: Iterable[Sequence], deadline: float, now: float) -> str | None:
        """Why a request ends now; None where the deadline was of another of its name, or is kept."""
        first = next(iter(family), None)
        if first is None:
            return None
        if first.request.deadline == deadline:
            return f"the request's deadline passed {now - deadline:.3f} s ago"
        waited = self.config.max_wait_seconds
        if waited and first.admitted + waited == deadline and not any(seq.entered for seq in family):
            return f"the request was not started within {waited:g} s; remedy: try again later"
        return None

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

    def stats(self) -> EngineStats:
        """A snapshot; what only the loop knows (host seconds) is left to it."""
        residents, c = self._residents, self._counters
        pool = self._kv.pools[0]
        running = len(residents.running)
        return EngineStats(
            running=running,
            waiting=sum(len(family) for family in self._live.values()) - running,
            free_blocks=pool.available,
            total_blocks=pool.num_blocks,
            steps=c.steps,
            last_step=c.last_step,
            in_flight=len(self._flight),
            preemptions=residents.num_preemptions,
            prompt_tokens=c.prompt_tokens,
            cached_tokens=c.cached_tokens,
            generation_tokens=c.generation_tokens,
            prefix_queries=c.prefix_queries,
            prefix_hits=c.prefix_hits,
            rejections=c.rejections,
            finished=dict(c.finished),
            step_seconds=c.step_seconds,
            kind_steps=dict(c.kind_steps),
            kind_seconds=dict(c.kind_seconds),
            step_sizes=tuple(c.step_sizes),
            step_tokens=c.step_tokens,
        )

    def check_integrity(self) -> None:
        """Raises InvariantError if any container is inconsistent, or a live sequence is in no queue."""
        self._residents.check_integrity()
        residents = self._residents
        queued = {id(seq) for queue in (residents.running, residents.waiting) for seq in queue}
        held = {
            id(child)
            for queue in (residents.running, residents.waiting)
            for s in queue
            for child in s.children
        }
        live = {id(seq) for family in self._live.values() for seq in family}
        if queued & held or queued | held != live:
            raise InvariantError(f"{len(live)} live sequences, {len(queued)} in queues, {len(held)} held")
        flying: dict[int, int] = {}
        for flight in self._flight:
            for seq in flight.seqs:
                flying[id(seq)] = flying.get(id(seq), 0) + 1
        for family in self._live.values():
            for seq in family:
                if seq.flying != flying.get(id(seq), 0) or not 0 <= seq.sampling_rows <= seq.flying:
                    raise InvariantError(f"sequence {seq.number} has lost count of its rows in flight")
