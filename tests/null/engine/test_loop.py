"""The engine's thread: order, refusals, failures, drain and close. Waits are for events, never for time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegainfer.contract.errors import EngineDeadError, InvariantError, PegaError, QueueFullError, RequestError
from pegainfer.contract.event import EngineStats, FinishReason, TokenEvent
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import PendingStep, StepPlan, StepResult
from pegainfer.contract.trace import StepTrace
from pegainfer.engine.loop import EngineLoop
from pegainfer.engine.pipeline import MAX_FAILURES
from pegainfer.engine.scheduler import Scheduler, SchedulerConfig
from pegainfer.null.pending import NullPending
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import MODEL, null_config, request

PATIENCE = 30.0  # seconds until a test gives up on an event that should have come


class Recorder:
    """A sink that keeps all it is told; `until` waits for something to be true of it."""

    def __init__(self) -> None:
        self.seen: list[TokenEvent] = []
        self.snapshots: list[EngineStats] = []
        self.refusals: list[tuple[str, PegaError]] = []
        self.num_drained = 0
        self.traced: list[StepTrace] = []
        self.deaths: list[EngineDeadError] = []
        self._news = threading.Condition()

    def events(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        with self._news:
            self.seen += events
            self.snapshots += [stats] if stats else []
            self._news.notify_all()

    def refused(self, request: GenerateRequest, error: PegaError) -> None:
        with self._news:
            self.refusals.append((request.id, error))
            self._news.notify_all()

    def steps(self, steps: list[StepTrace]) -> None:
        with self._news:
            self.traced += steps
            self._news.notify_all()

    def drained(self) -> None:
        with self._news:
            self.num_drained += 1
            self._news.notify_all()

    def dead(self, error: EngineDeadError) -> None:
        with self._news:
            self.deaths.append(error)
            self._news.notify_all()

    def until(self, true: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(true, PATIENCE)

    def finishes(self, request_id: str) -> list[TokenEvent]:
        return [e for e in self.seen if e.request_id == request_id and e.finish is not None]

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for e in self.seen if (e.request_id, e.index) == (request_id, index) for t in e.tokens]

    def finished(self, *request_ids: str) -> None:
        self.until(lambda: all(self.finishes(r) for r in request_ids))


class Gate:
    """A runner whose steps end only when the test lets them, one by one."""

    def __init__(self, inner: NullRunner) -> None:
        self.inner = inner
        self.info = inner.info
        self.launched = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)

    def forward(self, plan: StepPlan) -> Any:
        return self.inner.forward(plan)

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> PendingStep:
        pending = self.inner.sample(handle, masks)
        self.launched.release()
        return Held(self, pending)

    def close(self) -> None:
        self.inner.close()

    def await_launches(self, count: int) -> None:
        for _ in range(count):
            assert self.launched.acquire(timeout=PATIENCE)

    def open(self, steps: int = 1000) -> None:
        self.permits.release(steps)


class Held:
    def __init__(self, gate: Gate, pending: PendingStep) -> None:
        self.gate, self.pending = gate, pending

    def done(self) -> bool:
        return False

    def wait(self) -> StepResult:
        assert self.gate.permits.acquire(timeout=PATIENCE)
        return self.pending.wait()


class Engine:
    """A loop over a null runner, with its recorder."""

    def __init__(
        self,
        *,
        gated: bool = False,
        config: SchedulerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        **device: Any,
    ) -> None:
        self.null = NullRunner(null_config(**device))
        self.gate = Gate(self.null)
        self.sink = Recorder()
        runner = self.gate if gated else self.null
        self.scheduler = Scheduler(self.null.info, config)
        self.loop = EngineLoop(runner, self.scheduler, self.sink, clock=clock)
        self.loop.start()


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.gate.open()
        assert engine.loop.close(PATIENCE)


Make = Callable[..., Engine]


def answer(req: GenerateRequest, prompt: list[int]) -> list[int]:
    assert req.sampling.seed is not None
    return MODEL.continuation(
        prompt, req.sampling, req.sampling.seed, eos_token_ids=req.eos_token_ids, max_model_len=64
    )


def test_requests_are_answered(make: Make) -> None:
    engine = make()
    requests = {f"r{i}": request(f"r{i}", [i, 2, 3], seed=i) for i in range(10)}
    for req in requests.values():
        engine.loop.submit(req)
    engine.sink.finished(*requests)
    for i, (name, req) in enumerate(requests.items()):
        assert engine.sink.tokens(name) == answer(req, [i, 2, 3])
        assert len(engine.sink.finishes(name)) == 1


def test_the_next_plan_is_launched_while_one_runs(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=5, eos=()))
    engine.gate.await_launches(2)  # both before any step has ended
    assert engine.null.num_in_flight == 2
    engine.gate.open()
    engine.sink.finished("r")


def test_depth_one_waits_for_each_step(make: Make) -> None:
    engine = make(gated=True, config=SchedulerConfig(pipeline_depth=1))
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=3, eos=()))
    for _ in range(3):
        engine.gate.await_launches(1)
        assert engine.null.num_in_flight == 1
        engine.gate.open(1)
    engine.sink.finished("r")


def test_a_request_joins_while_another_runs(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("a", [1, 2, 3], max_tokens=30, eos=()))
    engine.gate.await_launches(2)
    engine.loop.submit(request("b", [4, 5], max_tokens=1))
    engine.gate.open(3)
    engine.sink.finished("b")
    assert not engine.sink.finishes("a")
    engine.gate.open()
    engine.sink.finished("a")


def test_cancel_while_its_rows_are_in_flight(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("r", [1, 2, 3], n=2, max_tokens=30, eos=()))
    engine.gate.await_launches(2)
    engine.loop.cancel("r")
    engine.gate.open()
    engine.sink.until(lambda: len(engine.sink.finishes("r")) == 2)
    assert {e.finish for e in engine.sink.finishes("r")} == {FinishReason.ABORT}


def test_cancel_right_after_submit(make: Make) -> None:
    engine = make()
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=30, eos=()))
    engine.loop.cancel("r")
    engine.sink.finished("r")
    assert len(engine.sink.finishes("r")) == 1


def test_refusals_name_their_exception(make: Make) -> None:
    engine = make(gated=True, config=SchedulerConfig(max_waiting_requests=1), max_slots=1)
    engine.loop.submit(request("bad", [99]))
    engine.loop.submit(request("a", [1, 2], max_tokens=9, eos=()))
    engine.gate.await_launches(1)
    engine.loop.submit(request("b", [1, 2], max_tokens=1))
    engine.loop.submit(request("c", [1, 2], max_tokens=1))
    engine.gate.open()
    engine.sink.finished("a", "b")
    assert [(name, type(error)) for name, error in engine.sink.refusals] == [
        ("bad", RequestError),
        ("c", QueueFullError),
    ]
    engine.sink.until(lambda: engine.loop.stats().rejections == 2)


def test_stats_are_true_when_idle(make: Make) -> None:
    engine = make()
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=4, eos=()))
    engine.sink.until(lambda: any(s.steps and not s.in_flight for s in engine.sink.snapshots))
    stats = engine.loop.stats()
    assert (stats.running, stats.waiting, stats.in_flight) == (0, 0, 0)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (3, 4, 4)
    assert stats.finished["length"] == 1
    assert set(stats.host_seconds) == {"schedule", "stage", "launch", "wait", "commit", "emit"}
    assert all(
        s > 0 for name, s in stats.host_seconds.items() if name != "stage"
    )  # the null device stages nothing


def test_snapshots_tell_of_work_before_its_first_token(make: Make) -> None:
    """A long prompt is no idleness: running is 1 from the first chunk on, and every chunk is a step made."""
    seconds = itertools.count(0.0, 1.0)  # so slow a machine that a snapshot is always due
    engine = make(gated=True, config=SchedulerConfig(max_prefill_tokens=2), clock=lambda: next(seconds))
    engine.loop.submit(request("r", [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1, eos=()))
    engine.sink.until(lambda: any((s.running, s.steps) == (1, 0) for s in engine.sink.snapshots))
    engine.gate.open(2)
    engine.sink.until(lambda: any((s.running, s.steps) == (1, 2) for s in engine.sink.snapshots))
    told = next(s for s in engine.sink.snapshots if s.steps == 2)
    assert told.last_step > 0.0
    assert engine.sink.seen == []  # not one event so far
    engine.gate.open()
    engine.sink.finished("r")


def test_a_finish_comes_with_a_snapshot_that_counts_it(make: Make) -> None:
    engine = make()
    for i in range(3):
        engine.loop.submit(request(f"r{i}", [1, 2, 3], max_tokens=2, eos=()))
        engine.sink.finished(f"r{i}")
        assert engine.sink.snapshots[-1].finished["length"] == i + 1


def test_drain_finishes_what_runs_and_refuses_the_rest(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("old", [1, 2, 3], max_tokens=9, eos=()))
    engine.gate.await_launches(1)
    engine.loop.drain()
    engine.loop.submit(request("new", [1, 2, 3]))
    assert not engine.loop.wait_drained(0)
    engine.gate.open()
    assert engine.loop.wait_drained(PATIENCE)
    engine.sink.until(lambda: engine.sink.num_drained == 1)
    assert len(engine.sink.tokens("old")) == 9
    ((name, error),) = engine.sink.refusals
    assert (name, type(error)) == ("new", QueueFullError)
    assert isinstance(error, QueueFullError) and error.retry_after > 0


def test_a_refusal_does_no_harm_to_the_live_request_of_the_same_id(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=5, eos=()))
    engine.gate.await_launches(1)
    engine.loop.submit(request("r", [1, 2, 3], max_tokens=9, eos=()))
    engine.loop.drain()
    engine.loop.submit(request("r", [4], max_tokens=9, eos=()))
    engine.gate.open()
    engine.sink.finished("r")
    assert [type(error) for _, error in engine.sink.refusals] == [RequestError, QueueFullError]
    assert len(engine.sink.tokens("r")) == 5
    assert engine.loop.wait_drained(PATIENCE) and engine.loop.alive()
    assert engine.loop.stats().rejections == 2


def test_an_idle_engine_is_drained_at_once(make: Make) -> None:
    engine = make()
    engine.loop.drain()
    assert engine.loop.wait_drained(PATIENCE)


def test_close_aborts_what_is_live(make: Make) -> None:
    engine = make(gated=True)
    engine.loop.submit(request("r", [1, 2, 3], n=2, max_tokens=30, eos=()))
    engine.gate.await_launches(2)
    closer = threading.Thread(target=engine.loop.close)
    closer.start()
    engine.gate.open()
    closer.join(PATIENCE)
    assert [e.finish for e in engine.sink.finishes("r")] == [FinishReason.ABORT] * 2
    assert engine.null.closed
    assert not engine.loop.alive()
    assert engine.sink.deaths == []  # an end that was asked for is no death
    with pytest.raises(EngineDeadError):
        engine.loop.submit(request("late", [1]))
    engine.loop.cancel("r")  # harmless


def test_a_policy_that_cannot_be_closed_does_not_hold_up_the_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(policy: Scheduler) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Scheduler, "close", fail)
    engine = make()
    engine.loop.close()
    assert engine.null.closed
    assert engine.loop.wait_drained(0)


def test_a_failed_step_ends_its_requests_alone(make: Make) -> None:
    failed: list[int] = []

    def faults(plan: StepPlan) -> Exception | None:
        if plan.news and plan.news[0].tokens == request("", [7, 7, 7]).prompt:
            failed.append(plan.step)
            return RuntimeError("secret path /x")
        return None

    engine = make(faults=faults)
    engine.loop.submit(request("bad", [7, 7, 7], max_tokens=5))
    engine.sink.finished("bad")
    (event,) = engine.sink.finishes("bad")
    assert event.finish is FinishReason.ERROR
    assert "RuntimeError" in (event.error or "") and "secret" not in (event.error or "")
    assert failed
    good = request("good", [1, 2, 3])
    engine.loop.submit(good)
    engine.sink.finished("good")
    assert engine.sink.tokens("good") == answer(good, [1, 2, 3])
    assert engine.loop.alive()


class Broken(NullRunner):
    """Raises when a step is launched, from the given step on; the plan before it is still in flight then."""

    def __init__(self, error: BaseException, first: int, last: int) -> None:
        super().__init__(null_config())
        self.error, self.first, self.last = error, first, last
        self.lost: NullPending | None = None

    def forward(self, plan: StepPlan) -> Any:
        step = super().forward(plan)
        if self.lost is not None:
            self.lost.wait()  # it counted as in flight up to here
            self.lost = None
        return step

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> NullPending:
        pending = super().sample(handle, masks)
        if self.first <= handle.plan.step <= self.last:
            self.lost = pending
            raise self.error
        return pending


def broken(error: BaseException, first: int = 2, last: int = 10**9) -> tuple[EngineLoop, Recorder]:
    runner, sink = Broken(error, first, last), Recorder()
    loop = EngineLoop(runner, Scheduler(runner.info), sink)
    loop.start()
    return loop, sink


def test_a_launch_that_fails_is_committed_in_its_turn() -> None:
    loop, sink = broken(ValueError("x"), first=2, last=2)
    req = request("r", [1, 2, 3], max_tokens=9, eos=())
    loop.submit(req)
    sink.finished("r")
    # The first token had been computed before the second step failed.
    assert sink.tokens("r") == answer(req, [1, 2, 3])[:1]
    assert sink.finishes("r")[0].finish is FinishReason.ERROR
    assert loop.alive()
    assert loop.close(PATIENCE)


class Panic(BaseException):
    """As a library in Rust raises where it has met a bug of its own."""


@pytest.mark.parametrize("error", [EngineDeadError("gone"), InvariantError("a bug"), Panic("at line 7")])
def test_an_unusable_runner_ends_the_engine(error: BaseException) -> None:
    loop, sink = broken(error)
    loop.submit(request("r", [1, 2, 3], n=2, max_tokens=9, eos=()))
    sink.until(lambda: bool(sink.deaths))
    assert [e.error_kind for e in sink.finishes("r")] == ["EngineDeadError"] * 2
    assert not sink.refusals
    assert loop.wait_drained(PATIENCE)
    with pytest.raises(EngineDeadError, match="the engine failed"):
        loop.submit(request("late", [1]))
    loop.close(PATIENCE)
    assert not loop.alive()


def test_a_runner_that_only_fails_is_unusable() -> None:
    runner, sink = NullRunner(null_config(faults=lambda plan: ValueError("x"))), Recorder()
    loop = EngineLoop(runner, Scheduler(runner.info), sink)
    loop.start()
    names = [f"r{i}" for i in range(MAX_FAILURES)]
    for name in names:
        loop.submit(request(name, [1, 2, 3], max_tokens=1))
        sink.finished(name)
    sink.until(lambda: bool(sink.deaths))
    kinds = [sink.finishes(name)[0].error_kind for name in names]
    assert kinds == [None] * (MAX_FAILURES - 1) + ["EngineDeadError"]
    loop.close(PATIENCE)
    assert not loop.alive()


def test_a_request_in_the_inbox_of_a_dying_engine_is_refused() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Dying:
        def done(self) -> bool:
            return False

        def wait(self) -> StepResult:
            entered.set()
            assert leave.wait(PATIENCE)
            raise EngineDeadError("gone")

    class Runner(NullRunner):
        def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> Any:
            super().sample(handle, masks)
            return Dying()

    runner, sink = Runner(null_config()), Recorder()
    loop = EngineLoop(runner, Scheduler(runner.info), sink)
    loop.start()
    loop.submit(request("a", [1, 2, 3]))
    assert entered.wait(PATIENCE)
    loop.submit(request("b", [1, 2, 3]))
    leave.set()
    sink.until(lambda: bool(sink.deaths))
    assert [(name, type(error)) for name, error in sink.refusals] == [("b", EngineDeadError)]
    assert [e.error_kind for e in sink.finishes("a")] == ["EngineDeadError"]


def test_the_tracer_sees_every_step() -> None:
    steps: list[tuple[int, int]] = []

    class Tracer:
        def step(self, plan: StepPlan, result: StepResult, now: float) -> None:
            steps.append((plan.step, result.step))

    runner, sink = NullRunner(null_config()), Recorder()
    loop = EngineLoop(runner, Scheduler(runner.info), sink, tracer=Tracer())
    loop.start()
    loop.submit(request("r", [1, 2, 3], max_tokens=4, eos=()))
    sink.finished("r")
    assert loop.close(PATIENCE)
    assert steps == [(i, i) for i in range(1, 5)]


class Preparing:
    """A null runner with three things to make ready; each waits for the test."""

    def __init__(self, inner: NullRunner) -> None:
        self.inner = inner
        self.info = inner.info
        self.begun = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.order: list[str] = []

    def prepare(self) -> bool:
        self.order.append("prepare")
        self.begun.release()
        assert self.permits.acquire(timeout=PATIENCE)
        return self.order.count("prepare") < 3

    def forward(self, plan: StepPlan) -> Any:
        self.order.append("step")
        return self.inner.forward(plan)

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> PendingStep:
        return self.inner.sample(handle, masks)

    def close(self) -> None:
        self.inner.close()


def test_an_idle_engine_makes_more_ready_and_a_request_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegainfer.engine.loop.CALM_SECONDS", 0.0)
    runner = Preparing(NullRunner(null_config()))
    sink = Recorder()
    loop = EngineLoop(runner, Scheduler(runner.info), sink)
    loop.start()
    assert runner.begun.acquire(timeout=PATIENCE)
    loop.submit(request("a", [1, 2, 3, 4], max_tokens=2))
    runner.permits.release()
    sink.finished("a")
    for _ in range(2):
        assert runner.begun.acquire(timeout=PATIENCE)
        runner.permits.release()
    loop.submit(request("b", [1, 2, 3, 4], max_tokens=2))
    sink.finished("b")
    assert loop.close(PATIENCE)
    steps = [name for name in runner.order if name == "step"]
    assert runner.order[0] == "prepare" and runner.order[1] == "step"
    assert runner.order.count("prepare") == 3 and runner.order[-1] == "step" and len(steps) >= 4
