"""Slowdowns that are planted into a server on the null device: the trace must name the right cause first."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from pegainfer.contract.grammar import GrammarFactory
from pegainfer.contract.request import GrammarSpec
from pegainfer.contract.step import PendingStep, StepPlan, StepResult
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.engine.scheduler import Scheduler
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.null.config import NullConfig
from pegainfer.null.runner import NullRunner
from pegainfer.observe.explain import Cause
from pegainfer.observe.summary import cause_sums
from pegainfer.observe.trace import RingBuffer, Trace
from tests.support.asgi import TEMPLATE, TOKENIZER, client
from tests.support.null_engine import null_info

STEP = 0.002  # seconds
STALL = 0.6  # seconds of a planted slowdown: far beyond what a busy machine adds
TRIES = 4  # of a scenario: a machine that is very busy adds stalls that are as long


def tried_again(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test again where it fails, some times at most."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        for left in reversed(range(TRIES)):
            try:
                return test(*args, **kwargs)
            except AssertionError:
                if not left:
                    raise

    return run


Load = Callable[[httpx.AsyncClient], Awaitable[Any]]


class SlowRunner:
    """The null device, of which some steps are slow to launch or to run."""

    def __init__(
        self,
        config: NullConfig,
        *,
        launch: Callable[[StepPlan], float] = lambda plan: 0.0,
        run: Callable[[StepPlan], float] = lambda plan: 0.0,
    ) -> None:
        """
        Args:
            launch: seconds that the launch of a plan takes longer, to make a graph.
            run: seconds that the device takes longer.
        """
        self._inner = NullRunner(config)
        self.info = self._inner.info
        self._launch = launch
        self._run = run

    def forward(self, plan: StepPlan) -> Any:
        time.sleep(self._launch(plan))
        return plan, self._inner.forward(plan)

    def sample(self, handle: Any, masks: dict[int, bytes] | None = None) -> PendingStep:
        plan, inner = handle
        return SlowPending(self._inner.sample(inner, masks), self._launch(plan), self._run(plan))

    def close(self) -> None:
        self._inner.close()


class SlowPending:
    def __init__(self, inner: PendingStep, launch: float, run: float) -> None:
        self._inner, self._launch, self._run = inner, launch, run

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> StepResult:
        result = self._inner.wait()
        time.sleep(self._run)
        return msgspec.structs.replace(result, seconds=result.seconds + self._run, cold_seconds=self._launch)


class SleepingScheduler(Scheduler):
    """Its host thread does something else in one step."""

    def __init__(self, *args: Any, what: Callable[[], object]) -> None:
        super().__init__(*args)
        self._what = what

    def schedule(self, now: float) -> Any:
        if self._counters.steps == 60:
            what, self._what = self._what, lambda: None
            what()
        return super().schedule(now)


def at_step(step: int, seconds: float) -> Callable[[StepPlan], float]:
    return lambda plan: seconds if plan.step == step else 0.0


async def complete(http: httpx.AsyncClient, prompt: str, tokens: int, **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def four(http: httpx.AsyncClient) -> None:
    """Four answers of 150 tokens, side by side: at least 150 steps of decodes."""
    await asyncio.gather(*(complete(http, f"prompt {i}", 150) for i in range(4)))


def trace_of(
    load: Load,
    runner: Any = None,
    *,
    policy: Scheduler | None = None,
    grammars: GrammarFactory | None = None,
    scheduler: SchedulerConfig | None = None,
    wrap: Callable[[App], Any] = lambda app: app,
    **null: Any,
) -> Trace:
    """A load's trace. Keyword arguments beyond the named ones are NullConfig's."""
    runner = runner or NullRunner(NullConfig(**{"step_seconds": STEP, **null}))
    engine = InProcessEngine(runner, null_info(runner), scheduler, policy=policy, grammars=grammars)
    buffer = RingBuffer()
    app = create_app(engine, TOKENIZER, TEMPLATE, HttpConfig(), buffer=buffer)

    async def main() -> None:
        assert app.front.tracing is not None
        app.front.tracing.start()
        async with client(wrap(app)) as http:
            await load(http)
        await app.front.tracing.stop()

    try:
        asyncio.run(asyncio.wait_for(main(), 110))
    finally:
        engine.close()
    return buffer.trace()


def first_cause(trace: Trace) -> Cause:
    sums = cause_sums(trace.steps, trace.requests)
    assert sums, "nothing was named"
    return sums[0].cause


def test_every_step_and_request_is_recorded() -> None:
    trace = trace_of(four)
    assert [s.step for s in trace.steps] == list(range(1, len(trace.steps) + 1))
    assert sum(s.decode_rows for s in trace.steps) >= 4 * 149
    assert sum(s.prefill_tokens for s in trace.steps) == 4 * len("prompt 0")
    for s in trace.steps:
        assert s.device == STEP
        assert sum(s.stages) == pytest.approx(s.period, abs=1e-6)
    assert len(trace.requests) == 4
    for r in trace.requests:
        assert r.timings is not None and r.completion_tokens == 150
        t = r.timings
        assert r.clock <= t.admitted == t.ready <= t.scheduled < t.first_token < t.finished
        assert t.finished - t.first_token == pytest.approx(149 * STEP, rel=2.0)


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (lambda: time.sleep(STALL), Cause.HOST),
        (lambda: _slow_collection(), Cause.COLLECT),
    ],
)
@tried_again
def test_the_host_thread_stands_still(what: Callable[[], object], cause: Cause) -> None:
    runner = NullRunner(NullConfig(step_seconds=STEP))
    policy = SleepingScheduler(runner.info, what=what)
    trace = trace_of(four, runner, policy=policy)
    assert first_cause(trace) is cause
    if cause is Cause.HOST:
        sums = cause_sums(trace.steps, trace.requests)
        assert "'schedule'" in sums[0].sentence
        assert sums[0].requests == 4
        assert sums[0].seconds == pytest.approx(4 * STALL, rel=0.5)


def _slow_collection() -> None:
    def sleep(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            time.sleep(STALL)

    gc.callbacks.append(sleep)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(sleep)


@tried_again
def test_a_kernel_has_become_slow() -> None:
    slow = SlowRunner(NullConfig(step_seconds=STEP), run=lambda plan: 0.03 if 60 <= plan.step < 80 else 0.0)
    assert first_cause(trace_of(four, slow)) is Cause.DEVICE


@tried_again
def test_a_graph_was_not_ready() -> None:
    slow = SlowRunner(NullConfig(step_seconds=STEP), launch=at_step(60, STALL))
    assert first_cause(trace_of(four, slow)) is Cause.COLD


@tried_again
def test_a_huge_prefill_beside_decodes() -> None:
    async def load(http: httpx.AsyncClient) -> None:
        answers = asyncio.gather(*(complete(http, f"prompt {i}", 120) for i in range(4)))
        await asyncio.sleep(60 * STEP)
        await complete(http, "x" * 3000, 1)
        await answers

    trace = trace_of(
        load,
        scheduler=SchedulerConfig(target_itl_ms=0.0),
        token_seconds=0.0002,
        max_tokens=4096,
    )
    assert first_cause(trace) is Cause.PREFILL


@tried_again
def test_requests_queue() -> None:
    assert first_cause(trace_of(four, max_slots=1)) is Cause.QUEUE


@tried_again
def test_the_pool_is_too_small() -> None:
    """Four sequences of 150 tokens and more, blocks for two of them."""
    trace = trace_of(four, num_blocks=(21,), step_seconds=0.005)
    assert sum(s.preempted for s in trace.steps) > 0
    assert first_cause(trace) in (Cause.PREEMPTION, Cause.POOL)


class SlowGrammars:
    """Knows no grammar until it was compiled, which takes long; every token may follow."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def known(self, spec: GrammarSpec) -> Any:
        return FreeMatcher() if spec.text in self._known else None

    def compile(self, spec: GrammarSpec) -> Any:
        time.sleep(STALL)
        self._known.add(spec.text)
        return FreeMatcher()

    def masks(self, matchers: Any, *, ends: Any) -> list[bytes | None]:
        return [None for _ in matchers]


class FreeMatcher:
    """Allows every token."""

    def copy(self) -> FreeMatcher:
        return self

    def accept(self, token: int) -> bool:
        return True

    def terminated(self) -> bool:
        return False


@tried_again
def test_a_grammar_compiles_long_in_the_engine() -> None:
    async def load(http: httpx.AsyncClient) -> None:
        await complete(http, "prompt", 50, structured_outputs={"regex": "[a-z]+"})

    trace = trace_of(load, grammars=SlowGrammars())
    assert first_cause(trace) is Cause.GRAMMAR
    (r,) = trace.requests
    assert r.timings is not None
    assert STALL <= r.timings.ready - r.timings.admitted <= r.seconds


@tried_again
def test_the_front_is_blocked() -> None:
    async def load(http: httpx.AsyncClient) -> None:
        answers = asyncio.gather(*(complete(http, f"prompt {i}", 150) for i in range(4)))
        await asyncio.sleep(50 * STEP)
        time.sleep(STALL)
        await answers

    assert first_cause(trace_of(load)) is Cause.FRONT


@tried_again
def test_a_client_reads_slowly() -> None:
    class Slow:
        """An ASGI app whose answers wait at every write."""

        def __init__(self, app: App) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def slow(message: Any) -> None:
                await asyncio.sleep(STALL / 4)
                await send(message)

            await self._app(scope, receive, slow)

    async def load(http: httpx.AsyncClient) -> None:
        await complete(http, "prompt", 50, stream=True)

    assert first_cause(trace_of(load, wrap=Slow)) is Cause.CLIENT
