"""pegainfer bench engine: prefill and decode rates of the engine alone, without HTTP or text."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pegainfer.app.config import EngineConfig
from pegainfer.cli.flags import Given
from pegainfer.cli.spec import EngineSpec, build
from pegainfer.cli.step_profile import CaseProfile, StepProfiler, print_profile
from pegainfer.cli.target import MODEL_HELP, ModelFlags, choose
from pegainfer.contract.errors import ConfigError, EngineDeadError
from pegainfer.engine.config import SchedulerConfig

if TYPE_CHECKING:
    from pegainfer.contract.event import TokenEvent
    from pegainfer.engine.inprocess import InProcessEngine
    from pegainfer.measure.profile import ProgramRun

SEED = 20240607  # of the random prompts: fresh for every request, so that no prefix is found in the cache


@dataclass(frozen=True, kw_only=True)
class EngineBenchFlags:
    """Raises ConfigError for sizes below 1."""

    prefill: tuple[int, ...] = field(default=(512,), metadata={"help": "Prompt tokens; may be repeated."})
    batch: tuple[int, ...] = field(
        default=(1, 2, 4, 8), metadata={"help": "Sequences that decode together; may be repeated."}
    )
    decode: int = field(default=128, metadata={"help": "Tokens that each sequence decodes."})
    context: int = field(default=16, metadata={"help": "Prompt tokens before the decoding."})
    rounds: int = field(default=5, metadata={"help": "Each round runs every case once."})
    by_op: bool = field(
        default=True, metadata={"help": "Show where each case's step spends its time (on the CPU)."}
    )
    output: str = field(
        default="bench/results/engine.jsonl", metadata={"help": "File to append JSON lines to."}
    )

    def __post_init__(self) -> None:
        numbers = (*self.prefill, *self.batch, self.context, self.rounds)
        if min(numbers) < 1 or self.decode < 2:
            raise ConfigError("sizes of a bench", expected="≥ 1, and --decode ≥ 2", got=numbers)

    @property
    def cases(self) -> list[Case]:
        """Prefills first, then batches that decode."""
        prefills = [Case("prefill", tokens) for tokens in self.prefill]
        return prefills + [Case("decode", self.decode, batch) for batch in self.batch]


@dataclass(frozen=True)
class Case:
    """Prefill of `tokens` tokens, or `tokens` decoded in each of `batch` sequences."""

    kind: str
    tokens: int
    batch: int = 1

    def __str__(self) -> str:
        return f"prefill {self.tokens}" if self.kind == "prefill" else f"decode {self.tokens} × {self.batch}"

    @property
    def wanted(self) -> Callable[[ProgramRun], bool] | None:
        """Whether a forward pass is what the case measures: a decode case begins with prefills. None: all."""
        if self.kind == "prefill":
            return None
        return lambda forward: forward.env["T"] == forward.env["R"] == self.batch


@dataclass(frozen=True)
class Measured:
    """What the rounds gave of a case."""

    case: Case
    runs: list[float]  # tokens a second, one a round
    roof: float | None  # tokens a second if moving a step's bytes were all
    host_stages: dict[str, float]  # microseconds a step, by what the host did

    @property
    def median(self) -> float:
        """Tokens a second."""
        import statistics

        return statistics.median(self.runs)

    @property
    def host_us(self) -> float:
        """Microseconds a step that the engine's thread worked rather than waited."""
        return sum(us for name, us in self.host_stages.items() if name not in ("wait", "stage"))

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case.kind,
            "tokens": self.case.tokens,
            "batch": self.case.batch,
            "tok_s": round(self.median, 2),
            "runs": [round(rate, 2) for rate in self.runs],
            "roof_tok_s": self.roof,
            "host_us_step": round(self.host_us, 1),
            "host_us_by_stage": {name: round(us, 1) for name, us in self.host_stages.items()},
        }


def engine(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    *,
    bench: EngineBenchFlags,
    flags: ModelFlags,
    engine: EngineConfig,
    scheduler: SchedulerConfig,
    given: Given,
) -> int:
    """Measure prefill and decode in tokens a second; cases alternate, medians are printed.

    Rates stand beside the machine's read bandwidth and the rate at which that alone would bound the weights.
    Then each case runs once more for a step's time by op against its floor.
    """
    from pegainfer.cli.machine import append_result
    from pegainfer.engine.inprocess import InProcessEngine

    most = max(bench.batch)
    scheduler = dataclasses.replace(scheduler, max_slots=scheduler.max_slots or most)
    target = choose(model, flags, engine, scheduler, given)
    where = _machine(target.spec, engine)
    profiled = bench.by_op and not target.spec.is_null and target.spec.engine.backend == "cpu"
    steps = StepProfiler(target.spec.engine) if profiled else None
    built = build(target.spec, steps.profiler if steps else None)
    tracer = steps.tracer if steps else None
    config = target.spec.scheduler
    running = InProcessEngine(
        built.runner, built.info, config, policy=built.policy(config), tracer=tracer, peers=built.peers
    )
    profiles: dict[Case, CaseProfile] = {}
    try:
        driver = _Driver(running, bench.context)
        rates = _alternate(driver, bench.cases, bench.rounds)
        if steps is not None:
            steps.measure_again()
            where |= {"read_gb_s": steps.roofline.read_gb_s, "peaks": steps.roofline.peaks}
            for case in bench.cases:
                profiles[case] = steps.profile(running, partial(driver.rate, case), case.wanted)
    finally:
        running.close()
    measured = [
        Measured(case, runs, _roof(target.spec, case, where["read_gb_s"]), driver.host_stages(case))
        for case, runs in rates.items()
    ]
    print(f"{built.info.model} on {built.info.device}; {where['cpu']}, reads {where['read_gb_s']} GB/s")
    _print_rates(measured, bench.rounds)
    for case, profile in profiles.items():
        print_profile(str(case), profile)
    origin = {**where, "bench": "engine", "model": built.info.model, "device": built.info.device}
    for m in measured:
        step = {"step": profiles[m.case].to_json()} if m.case in profiles else {}
        append_result(Path(bench.output), {**origin, **m.to_json(), "context": bench.context, **step})
    return 0


def _print_rates(measured: list[Measured], rounds: int) -> None:
    """A line a case of its rates, then one of what the host did."""
    head = f"{'case':16} {'tok/s':>8} {'least':>8} {'most':>8} {'roof':>8} {'host':>8}"
    print(f"{head}   (medians of {rounds}; host: µs a step)")
    for m in measured:
        roof = f"{m.roof:8.0f}" if m.roof else f"{'–':>8}"
        rates = f"{m.median:8.1f} {min(m.runs):8.1f} {max(m.runs):8.1f}"
        print(f"{m.case!s:16} {rates} {roof} {m.host_us:8.0f}")
    print("host µs a step by stage (stage: making arrays; on a GPU it is part of launch)")
    for m in measured:
        print(f"{m.case!s:16} {', '.join(f'{name} {us:.1f}' for name, us in m.host_stages.items())}")


def _machine(spec: EngineSpec, engine: EngineConfig) -> dict[str, Any]:
    """Machine and commit, with the read bandwidth of the memory that holds the weights."""
    from pegainfer.cli.machine import num_cores, provenance

    where = provenance(engine.threads or num_cores())
    if not spec.is_null and spec.engine.backend == "cuda":
        from pegainfer.app.gpu import read_bandwidth

        where["read_gb_s"] = round(read_bandwidth(engine), 1)
    return where


def _alternate(driver: _Driver, cases: list[Case], rounds: int) -> dict[Case, list[float]]:
    """Every case once a round, so that a noisy moment touches all of them; one round before, to warm up."""
    rates: dict[Case, list[float]] = {case: [] for case in cases}
    for i in range(rounds + 1):
        for case in cases:
            rate = driver.rate(case)
            if i:
                rates[case].append(rate)
        if i == 0:
            driver.forget_host_work()
        if sys.stderr.isatty():
            print(f"\rround {i} of {rounds}", end="" if i < rounds else "\n", file=sys.stderr, flush=True)
    return rates


def _roof(spec: EngineSpec, case: Case, read_gb_s: float) -> float | None:
    """Tokens a second of decoding if moving the step's bytes at the measured bandwidth were all."""
    if spec.is_null or case.kind == "prefill":
        return None
    from pegainfer.cli.plan import step_programs

    moved = step_programs(spec).cost(case.batch, case.batch).bytes
    return round(case.batch * read_gb_s * 1e9 / moved, 1)


class _Driver:
    """Sends requests of random token ids and times their events."""

    def __init__(self, engine: InProcessEngine, context: int) -> None:
        import random

        self._engine = engine
        self._context = context
        self._random = random.Random(SEED)
        self._sent = 0
        self._host: dict[Case, tuple[dict[str, float], int]] = {}  # the host's seconds by stage, steps

    def rate(self, case: Case) -> float:
        """Tokens a second of one run."""
        before = self._engine.stats()
        rate = self.prefill(case.tokens) if case.kind == "prefill" else self.decode(case.tokens, case.batch)
        after = self._engine.stats()
        seconds, steps = self._host.setdefault(case, ({}, 0))
        for name, total in after.host_seconds.items():
            seconds[name] = seconds.get(name, 0.0) + total - before.host_seconds.get(name, 0.0)
        self._host[case] = (seconds, steps + after.steps - before.steps)
        return rate

    def forget_host_work(self) -> None:
        """After a round that warms up: sizes that come for the first time are made ready then."""
        self._host.clear()

    def host_stages(self, case: Case) -> dict[str, float]:
        """Microseconds a step by stage, over all runs so far."""
        seconds, steps = self._host[case]
        return {name: 1e6 * total / max(1, steps) for name, total in seconds.items()}

    def prefill(self, tokens: int) -> float:
        """Prompt tokens a second, from the first step that computes one to the first token drawn."""
        (events,) = self._run(1, tokens, 1)
        timings = events[-1][1].timings
        assert timings is not None
        return tokens / (timings.first_token - timings.scheduled)

    def decode(self, tokens: int, batch: int) -> float:
        """Tokens a second over the time in which all sequences decode."""
        runs = self._run(batch, self._context, tokens)
        begin = max(events[0][0] for events in runs)
        end = min(events[-1][0] for events in runs)
        count = sum(len(e.tokens) for events in runs for at, e in events if begin < at <= end)
        return count / (end - begin)

    def _run(self, batch: int, prompt: int, answer: int) -> list[list[tuple[float, TokenEvent]]]:
        """Runs `batch` requests together; each one's events with a token, and when they came."""
        from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens

        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        logs: list[list[tuple[float, TokenEvent]]] = [[] for _ in range(batch)]
        done = threading.Semaphore(0)
        for log in logs:
            ids = self._random.choices(range(self._engine.info.vocab_size), k=prompt)
            self._sent += 1
            request = GenerateRequest(id=f"bench-{self._sent}", prompt=pack_tokens(ids), sampling=sampling)
            self._engine.submit(request, _recorder(log, done))
        for _ in logs:
            done.acquire()
        for log in logs:
            if log[-1][1].error is not None:
                raise EngineDeadError(f"the bench's request failed: {log[-1][1].error}")
        return logs


def _recorder(log: list[tuple[float, TokenEvent]], done: threading.Semaphore) -> Callable[[Any], None]:
    def sink(event: TokenEvent) -> None:
        if event.tokens or event.finish is not None:
            log.append((time.perf_counter(), event))
        if event.finish is not None:
            done.release()

    return sink
