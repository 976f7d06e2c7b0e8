"""Drives a scheduler on the null device without threads or time, and judges every event and every step."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from pegainfer.app.ranks import null_ranks
from pegainfer.contract.adapter import AdapterInfo, AdapterLoad, AdapterRunner
from pegainfer.contract.errors import ModelFileError
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens, unpack_tokens
from pegainfer.contract.step import KVSpec, PageGroup, PendingStep, StateGroup, StepPlan, StepResult
from pegainfer.contract.tiers import DEVICE
from pegainfer.engine.admission import derived_seed
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig
from pegainfer.engine.sequence import Sequence, Status
from pegainfer.kv.blocks import BlockPool
from pegainfer.null.config import NullConfig
from pegainfer.null.model import NullModel

BLOCK = 4
EOS = 30
BAD_TOKEN = 31  # a faulty row's mark: see `bad_rows`
MODEL = NullModel(vocab_size=32, letters=tuple(range(20)), eos_id=EOS, eos_every=12)

PAGES = KVSpec((PageGroup(name="full", block_size=BLOCK, bytes_per_block=1),))
HYBRID = KVSpec(
    (
        PageGroup(name="full", block_size=BLOCK, bytes_per_block=1),
        StateGroup(name="state", bytes_per_state=1, snapshot_every=2 * BLOCK),
    )
)
WINDOW = KVSpec(
    (
        PageGroup(name="full", block_size=2 * BLOCK, bytes_per_block=1),
        PageGroup(name="window", block_size=BLOCK, bytes_per_block=1, window=6),
    )
)
ALL = KVSpec((*WINDOW.groups, StateGroup(name="state", bytes_per_state=1, snapshot_every=2 * BLOCK)))
SPECS = {"pages": PAGES, "hybrid": HYBRID, "window": WINDOW, "all": ALL}


def request(
    id: str,
    prompt: list[int],
    *,
    n: int = 1,
    salt: str = "",
    priority: int = 0,
    deadline: float | None = None,
    tenant: str = "",
    eos: tuple[int, ...] = (EOS,),
    adapter: str | None = None,
    adapter_digest: bytes = b"",
    block_hashes: bytes = b"",
    block_size: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """A request with a seed, so that its tokens can be predicted."""
    sampling.setdefault("seed", 7)
    return GenerateRequest(
        id=id,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(**sampling),
        n=n,
        eos_token_ids=eos,
        cache_salt=salt,
        priority=priority,
        deadline=deadline,
        tenant=tenant,
        adapter=adapter,
        adapter_digest=adapter_digest,
        block_hashes=block_hashes,
        block_size=block_size,
    )


def null_config(**changes: Any) -> NullConfig:
    """A small device: one group, 64 blocks of 4 tokens, 4 slots, 16 tokens a step, 64 tokens of context."""
    small: dict[str, Any] = {
        "model": MODEL,
        "kv": PAGES,
        "num_blocks": (64,),
        "max_slots": 4,
        "max_tokens": 16,
        "max_model_len": 64,
    }
    return NullConfig(**(small | changes))


@dataclass
class Answer:
    """What one continuation has received so far."""

    tokens: list[int] = field(default_factory=list)
    finish: TokenEvent | None = None
    events: list[TokenEvent] = field(default_factory=list)


def all_pools(scheduler: Scheduler) -> list[BlockPool]:
    """Of all groups, the tiers' included."""
    pools = []
    for home in scheduler._residents.homes:
        kv = home.kv
        tiers = () if kv.tiers is None else (pool for levels in kv.tiers._levels for pool in levels.pools[1:])
        pools += [*kv.pools, *tiers]
    return pools


class Driver:
    """One scheduler, one null runner, a clock that ticks once a step and goes on by what steps take."""

    def __init__(
        self,
        null: NullConfig | None = None,
        config: SchedulerConfig | None = None,
        *,
        seed: int = 0,
        tick: float = 1.0,
        check: bool = True,
        ranks: tuple[int, int] = (1, 1),
        adapter_steps: int = 3,
        failed_loads: float = 0.0,
    ) -> None:
        """
        Args:
            adapter_steps: a load of an adapter ends after one to so many schedules.
            failed_loads: share of them that fail.
            ranks: tensor-parallel and data-parallel; `null` is the config of each.
            tick: seconds that each `schedule` takes.
            check: all containers after each operation; too slow for large pools.
        """
        self._tick = tick
        self._check = check
        self.null = null or null_config()
        self.config = config or SchedulerConfig()
        self.ranks = ranks
        self.runner = null_ranks(self.null, *ranks)
        self.scheduler = Scheduler(self.runner.info, self.config, random.Random(seed))
        self.pending: deque[tuple[StepPlan, PendingStep]] = deque()
        self.now = 1.0
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.counts: Counter[str] = Counter()
        self.adapters: dict[str, AdapterInfo] = {}
        self._adapter_steps = adapter_steps
        self._failed_loads = failed_loads
        self._rng = random.Random(seed)
        self._adapter_loads: list[tuple[int, AdapterLoad]] = []  # with the schedules until their end
        self._installed: set[int] = set()
        self._digests: dict[str, bytes] = {}  # of the adapter of each request that names one
        self._loads: set[int] = set()  # transfers to the device
        self._wasted: Counter[int] = Counter()  # rows committed after the finish, by sequence number
        self._stalled: tuple[int, int] = (-1, 0)  # the best-ranked sequence, schedules without a row of it

    @property
    def running(self) -> list[Sequence]:
        return [seq for home in self.scheduler._residents.homes for seq in home.running]

    @property
    def waiting(self) -> list[Sequence]:
        return self.scheduler._residents.waiting.items

    def add(self, req: GenerateRequest) -> None:
        self.scheduler.add(req, self.now)
        self.requests[req.id] = req
        if req.adapter is not None:
            self._digests[req.id] = self.adapters[req.adapter].digest
            self.counts["requests with adapters"] += 1
        for index in range(req.n):
            self.answers[req.id, index] = Answer()
        self.counts["requests"] += 1
        self.counts["sequences"] += req.n
        self._check_integrity()

    def load_adapter(self, name: str, path: str) -> None:
        """Raises RequestError where the name is taken."""
        assert isinstance(self.runner, AdapterRunner)
        info, _ = self.runner.read_adapter(name, path)
        self.scheduler.add_adapter(info)
        self.adapters[name] = info
        self.counts["adapters loaded"] += 1
        self._check_integrity()

    def unload_adapter(self, name: str) -> None:
        self.scheduler.drop_adapter(name)
        del self.adapters[name]
        self._serve_adapters()

    def _serve_adapters(self) -> None:
        """Ends loads that are due, and starts others."""
        self.counts["adapters removed"] += len(self.scheduler.take_unloaded_adapters())
        due = [load for left, load in self._adapter_loads if left <= 1]
        self._adapter_loads = [(left - 1, load) for left, load in self._adapter_loads if left > 1]
        for load in due:
            self._end_adapter_load(load)
        for load in self.scheduler.take_adapter_loads():
            self._adapter_loads.append((self._rng.randint(1, self._adapter_steps), load))
        self._check_integrity()

    def _end_adapter_load(self, load: AdapterLoad) -> None:
        runner, index = self.runner, load.index
        assert isinstance(runner, AdapterRunner)
        if index in self._installed:
            self._installed.remove(index)
            runner.remove_adapter(index)
        error = None
        if self._rng.random() < self._failed_loads:
            error = ModelFileError("the files are gone")
            self.counts["adapter loads that failed"] += 1
        else:
            runner.install_adapter(index, runner.read_adapter(load.info.name, load.info.path)[1])
            self._installed.add(index)
            self.counts["adapter loads"] += 1
        self._take(self.scheduler.end_adapter_load(index, error, self.now))

    def reset_prefix_cache(self) -> None:
        """No pool of any tier and rank finds anything afterwards."""
        self.scheduler.reset_prefix_cache()
        assert not any(pool._index or pool.num_cached for pool in all_pools(self.scheduler))
        self.counts["cache resets"] += 1
        self._check_integrity()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.cancel(request_id, index)

    def launch(self) -> StepPlan | None:
        """Schedules once; a plan is given to the runner."""
        self.now += self._tick
        full = len(self.pending) >= self.config.pipeline_depth
        plan, events = self.scheduler.schedule(self.now)
        assert plan is None or not full, "a plan beyond the pipeline's depth"
        self._take(events)
        if plan is not None:
            self.plans.append(plan)
            self.pending.append((plan, self.runner.sample(self.runner.forward(plan))))
            self._count_plan(plan)
        self._serve_adapters()
        if not full:
            self._check_progress(plan)
        self._check_integrity()
        return plan

    def _check_integrity(self) -> None:
        if self._check:
            self.scheduler.check_integrity()

    def commit(self) -> StepResult | None:
        """Commits the oldest plan in flight, if there is one."""
        if not self.pending:
            return None
        plan, pending = self.pending.popleft()
        result = pending.wait()
        self.now += result.seconds
        self.results.append(result)
        seqs = self.scheduler._flight[0].seqs
        for seq in seqs:
            if seq.status is Status.FINISHED:
                self.counts["wasted rows"] += 1
                self._wasted[seq.number] += 1
                # One that ended by itself had one row in flight at most; one that was ended had all of them.
                end = self.answers[seq.request.id, seq.index].finish
                by_itself = end is not None and end.finish in (FinishReason.STOP, FinishReason.LENGTH)
                most = self.config.pipeline_depth - by_itself
                assert self._wasted[seq.number] <= most, "a finished sequence runs on"
        for row, new in zip(plan.rows, result.tokens, strict=True):
            if row.sample:
                self.counts[f"rows that committed {len(new)}"] += 1
        self.counts["tokens"] += sum(len(new) for new in result.tokens)
        self.counts["transfers that failed"] += len(result.failed)
        self.counts["loads that failed"] += len(self._loads & result.failed.keys())
        self._take(self.scheduler.commit(plan, result, self.now))
        self._check_integrity()
        return result

    def step(self) -> None:
        """What the loop does: launch until the pipeline is full, then commit the oldest."""
        if self.launch() is None or len(self.pending) >= self.config.pipeline_depth:
            self.commit()

    def run(self, limit: int = 10_000) -> None:
        """Until all is answered and committed."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                for _ in range(3 * self._adapter_steps):  # loads that nobody waits for
                    self._serve_adapters()
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def _count_plan(self, plan: StepPlan) -> None:
        self.counts["steps"] += 1
        self.counts["rows"] += len(plan.rows)
        ranks = {self.runner.info.rank_of(row.slot) for row in plan.rows}
        self.counts["steps of several data ranks"] += len(ranks) > 1
        self.counts["rows times ranks"] += len(plan.rows) * self.ranks[0]
        self.counts["follow rows"] += sum(row.follow for row in plan.rows)
        self.counts["admissions"] += len(plan.news)
        self.counts["copies"] += len(plan.copies)
        self.counts["snapshots"] += len(plan.snapshots)
        self.counts["transfers"] += len(plan.transfers)
        loads = {t.id for t in plan.transfers if t.target_pool == DEVICE}
        self._loads |= loads
        self.counts["loads"] += len(loads)
        self.counts["plans that wait for transfers"] += plan.wait_transfers
        mixed = {row.count > 1 for row in plan.rows}
        self.counts["mixed steps"] += len(mixed) == 2

    def _check_progress(self, plan: StepPlan | None) -> None:
        """The best-ranked sequence is never passed over for long."""
        if self.null.max_tokens <= self.null.max_slots:
            return  # then decodes may take all of a step
        if plan is None and self.pending:
            return  # what is in flight is waited for
        queued = self.running + self.waiting
        if not queued:
            return
        best = min(queued, key=lambda seq: seq.rank)
        if not best.entered and len({seq.tenant for seq in self.waiting}) > 1:
            return  # the least served tenant goes first, whatever the rank
        placed = plan is not None and best.last_step == plan.step
        number, schedules = self._stalled
        self._stalled = (best.number, 0 if placed or best.number != number else schedules + 1)
        bound = 2 * (self.runner.info.max_slots + 2)  # each of the others may have to be preempted first
        assert self._stalled[1] <= bound, f"sequence {best.number} is passed over"

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            answer = self.answers[event.request_id, event.index]
            assert answer.finish is None, f"an event after the finish: {event}"
            assert event.tokens or event.finish is not None, f"an empty event: {event}"
            answer.events.append(event)
            answer.tokens += event.tokens
            if event.finish is not None:
                answer.finish = event
                self.counts[f"finish {event.finish.value}"] += 1

    # Judgement

    def expected(self, request_id: str, index: int) -> list[int]:
        """The tokens of a continuation, computed without an engine."""
        req = self.requests[request_id]
        assert req.sampling.seed is not None
        return self.null.model.continuation(
            unpack_tokens(req.prompt),
            req.sampling,
            derived_seed(req.sampling.seed, index),
            eos_token_ids=req.eos_token_ids,
            max_model_len=min(self.null.max_model_len, self.scheduler._admission.reach),
            adapter_digest=self._digests.get(request_id, b""),
        )

    def judge(self) -> None:
        """At the end: one finish an index, the predicted tokens, and nothing leaked."""
        for (request_id, index), answer in self.answers.items():
            self._judge_answer(request_id, index, answer)
        self.check_empty()
        stats = self.scheduler.stats()
        self.counts["preemptions"] += stats.preemptions
        self.counts["prefix hits (tokens)"] += stats.prefix_hits

    def _judge_answer(self, request_id: str, index: int, answer: Answer) -> None:
        expected, where = self.expected(request_id, index), f"{request_id}/{index}"
        sampling = self.requests[request_id].sampling
        assert answer.finish is not None, f"{where} never finished"
        assert [e for e in answer.events if e.finish is not None] == answer.events[-1:], where
        ended = answer.finish.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert answer.tokens == (expected if ended else expected[: len(answer.tokens)]), where
        stopped = answer.finish.finish is FinishReason.STOP
        assert answer.finish.stop_token == (expected[-1] if stopped else None), where
        if stopped:
            assert len(answer.tokens) > sampling.min_tokens, where
        if sampling.logprobs is not None:
            assert all(e.logprobs is not None or not e.tokens for e in answer.events), where
            got = [p.token for e in answer.events for p in e.logprobs or ()]
            assert got == answer.tokens, where
        given = [e.prompt_logprobs for e in answer.events if e.prompt_logprobs is not None]
        if sampling.prompt_logprobs is not None and index == 0 and (ended or answer.tokens):
            prompt = unpack_tokens(self.requests[request_id].prompt)
            assert answer.events[0].prompt_logprobs is not None and len(given) == 1, where
            assert [p and p.token for p in given[0]] == [None, *prompt[1:]], where
        else:
            assert not given, where

    def check_empty(self) -> None:
        """All blocks are free or cached, all slots free, all adapters that were unloaded gone."""
        self.scheduler.check_integrity()
        residents = self.scheduler._residents
        for pool in all_pools(self.scheduler):
            assert pool.available == pool.num_blocks and pool.num_deferred == pool.num_moving == 0
        assert not residents.loading and not residents.tiering.has_work
        assert self.counts["adapters loaded"] - self.counts["adapters removed"] == len(self.adapters)
        assert all(sorted(home.free_slots) == list(home.slots) for home in residents.homes)
        adapters = residents.adapters
        assert not (adapters.is_loading or adapters._unloaded)
        assert all(a is None or a.live == a.holds == 0 for a in adapters._slots)
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == stats.in_flight == 0
        assert sum(stats.finished.values()) == len(self.answers)
