"""Drives a scheduler on the null device without threads or time, and judges every event and every step."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens, unpack_tokens
from pegainfer.contract.step import KVSpec, PageGroup, StateGroup, StepPlan, StepResult
from pegainfer.engine.null import NullConfig, NullPending, NullRunner
from pegainfer.engine.null_model import NullModel
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig, derived_seed

BLOCK = 4
EOS = 30
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
SPECS = {"pages": PAGES, "hybrid": HYBRID, "window": WINDOW}


def request(
    id: str,
    prompt: list[int],
    *,
    n: int = 1,
    salt: str = "",
    priority: int = 0,
    deadline: float | None = None,
    eos: tuple[int, ...] = (EOS,),
    **sampling: object,
) -> GenerateRequest:
    """A request with a seed, so that its tokens can be predicted."""
    sampling.setdefault("seed", 7)
    return GenerateRequest(
        id=id,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        n=n,
        eos_token_ids=eos,
        cache_salt=salt,
        priority=priority,
        deadline=deadline,
    )


@dataclass
class Answer:
    """What one continuation has received so far."""

    tokens: list[int] = field(default_factory=list)
    finish: TokenEvent | None = None
    events: list[TokenEvent] = field(default_factory=list)


class Driver:
    """One scheduler, one null runner, a clock that ticks once a step."""

    def __init__(
        self,
        null: NullConfig | None = None,
        config: SchedulerConfig | None = None,
        *,
        seed: int = 0,
        check: bool = True,
    ) -> None:
        self.null = null or NullConfig(
            model=MODEL, kv=PAGES, num_blocks=(64,), max_slots=4, max_tokens=16, max_model_len=64
        )
        self.config = config or SchedulerConfig()
        self.runner = NullRunner(self.null)
        self.scheduler = Scheduler(self.runner.info, self.config, random.Random(seed))
        self.pending: deque[tuple[StepPlan, NullPending]] = deque()
        self.now = 1.0
        self.steps = 0
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.check = check

    def add(self, req: GenerateRequest) -> None:
        self.scheduler.add(req, self.now)
        self.requests[req.id] = req
        for index in range(req.n):
            self.answers[req.id, index] = Answer()
        self.verify()

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def launch(self) -> StepPlan | None:
        """Schedules once; a plan is given to the runner."""
        self.now += 1.0
        plan, events = self.scheduler.schedule(self.now)
        self.take(events)
        if plan is not None:
            self.steps += 1
            self.plans.append(plan)
            self.pending.append((plan, self.runner.sample(self.runner.forward(plan))))
        self.verify()
        return plan

    def commit(self) -> StepResult | None:
        """Commits the oldest plan in flight, if there is one."""
        if not self.pending:
            return None
        plan, pending = self.pending.popleft()
        result = pending.wait()
        self.results.append(result)
        self.take(self.scheduler.commit(plan, result, self.now))
        self.verify()
        return result

    def step(self) -> None:
        """What the loop does: launch until the pipeline is full, then commit the oldest."""
        if self.launch() is None or len(self.pending) >= self.config.pipeline_depth:
            self.commit()

    def run(self, limit: int = 10_000) -> None:
        """Until all is answered and committed."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def verify(self) -> None:
        if self.check:
            self.scheduler.check_integrity()

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            answer = self.answers[event.request_id, event.index]
            assert answer.finish is None, f"an event after the finish: {event}"
            assert event.tokens or event.finish is not None, f"an empty event: {event}"
            answer.events.append(event)
            answer.tokens += event.tokens
            if event.finish is not None:
                answer.finish = event

    # Judgement

    def expected(self, request_id: str, index: int) -> list[int]:
        req = self.requests[request_id]
        sampling = req.sampling
        assert sampling.seed is not None
        return self.null.model.continuation(
            unpack_tokens(req.prompt),
            sampling,
            derived_seed(sampling.seed, index),
            eos_token_ids=req.eos_token_ids,
            max_model_len=self.limit,
        )

    @property
    def limit(self) -> int:
        """Tokens a sequence may have: the context, or what the pools hold."""
        return min(self.null.max_model_len, self.scheduler._reach)

    def judge(self) -> None:
        """At the end: one finish an index, the predicted tokens, and nothing leaked."""
        for (request_id, index), answer in self.answers.items():
            expected = self.expected(request_id, index)
            where = f"{request_id}/{index}"
            assert answer.finish is not None, f"{where} never finished"
            reason = answer.finish.finish
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert answer.tokens == expected[: len(answer.tokens)], where
                continue
            assert answer.tokens == expected, where
            stopped = reason is FinishReason.STOP
            assert stopped == (answer.finish.stop_token is not None), where
            if stopped:
                assert answer.finish.stop_token == expected[-1], where
        self.check_empty()

    def check_empty(self) -> None:
        """All blocks are free or cached, all slots free."""
        self.scheduler.check_integrity()
        residents = self.scheduler._residents
        for pool in residents.kv.pools:
            assert pool.available == pool.num_blocks and pool.num_deferred == 0
        assert len(residents.free_slots) == residents.num_slots
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == stats.in_flight == 0
        assert sum(stats.finished.values()) == len(self.answers)
