"""A whole run: samples, arrivals, processes, figures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegainfer.bench import bodies, datasets, processes, schedule
from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig, ServerConfig
from pegainfer.bench.cost import ClientCost
from pegainfer.bench.datasets import Sample, TextTool
from pegainfer.bench.health import HealthProbe
from pegainfer.bench.metrics import Figures, figures
from pegainfer.bench.server_cost import ServerCost, scrape
from pegainfer.bench.target import Target
from pegainfer.bench.wire import Job, Outcome, Record, Work

GENERATED = ("random", "prefix_repetition")
UNBOUNDED_PLACES = 256  # requests at one time that a rate without a bound is taken to mean


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the user chose, and the tools the command brings."""

    server: ServerConfig
    load: LoadConfig
    dataset: DatasetConfig
    sampling: SamplingConfig
    report: ReportConfig
    text: TextTool | None

    @property
    def chat(self) -> bool:
        return self.server.api == "openai-chat"

    @property
    def self_timed(self) -> bool:
        timed = self.load.self_timed
        return self.dataset.dataset_name == "timed_trace" if timed is None else timed


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a plan. Records and lengths are in the order of the samples."""

    plan: Plan
    model: str
    start: float  # CLOCK_MONOTONIC seconds
    records: list[Record]
    input_lens: list[int]
    mismatched: int  # requests whose prompt the server counted otherwise
    figures: Figures
    cost: ClientCost | None  # None: there was no client, the run was simulated
    probe: HealthProbe | None
    server: ServerCost | None  # where the server tells


Say = Callable[[str], None]


def run(plan: Plan, say: Say, on_progress: Callable[[int], None]) -> Run:
    """Runs the bench.

    Args:
        say: gets lines about what is going on.
        on_progress: gets the number of requests that ended since its last call.

    Raises:
        ConfigError: nothing answers at the address, or the dataset cannot be used.
        EngineDeadError: a client process has ended.
    """
    target = Target.of(plan.server)
    listed = target.first_model(plan.server.ready_check_timeout_sec)
    model = plan.server.model or listed or ""
    sent_model = plan.server.served_model_name or plan.server.model or listed
    samples = datasets.load(plan.dataset, plan.load.num_prompts, plan.load.seed, plan.text)
    jobs = _jobs(plan, samples, sent_model)
    if plan.load.num_warmups:
        say(f"Warming up with {plan.load.num_warmups} requests...")
        _warm_up(plan, target, samples, sent_model)
    for line in _traffic(plan):
        say(line)
    places = plan.load.max_concurrency or min(UNBOUNDED_PLACES, len(jobs))
    count = processes.process_count(plan.load.client_processes, places)
    works = [
        _work(plan, target, share, concurrency)
        for share, concurrency in processes.deal(jobs, count, plan.load.max_concurrency or 0)
    ]
    probe = HealthProbe(target) if plan.load.probe_health else None
    if probe is not None:
        probe.start()
    before = scrape(target)
    try:
        start, outcomes = processes.run(works, on_progress)
    finally:
        if probe is not None:
            probe.stop()
    scheduled = plan.self_timed or jobs[-1].at > 0
    cost = ClientCost.of(outcomes, scheduled=scheduled)
    server = ServerCost.between(before, scrape(target))
    return _outcome(plan, model, samples, start, outcomes, cost, probe, server)


def _outcome(
    plan: Plan,
    model: str,
    samples: Sequence[Sample],
    start: float,
    outcomes: Sequence[Outcome],
    cost: ClientCost,
    probe: HealthProbe | None,
    server: ServerCost | None,
) -> Run:
    """What the client processes bring back, in the order of the samples."""
    records = sorted((r for o in outcomes for r in o.records), key=lambda r: r.index)
    lens = [_input_len(s, r) for s, r in zip(samples, records, strict=True)]
    ends = [r.start + r.latency for r in records if not r.error]
    duration = (max(ends) - start) if ends else max(o.wall_seconds for o in outcomes)
    return Run(
        plan=plan,
        model=model,
        start=start,
        records=records,
        input_lens=lens,
        mismatched=sum(
            s.prompt_len not in (None, n) and not r.error
            for s, n, r in zip(samples, lens, records, strict=True)
        ),
        figures=figures(
            records,
            input_lens=lens,
            duration=duration,
            percentiles=plan.report.percentiles(),
            slos=plan.report.slos(),
        ),
        cost=cost,
        probe=probe,
        server=server,
    )


def _jobs(plan: Plan, samples: Sequence[Sample], model: str | None) -> list[Job]:
    if plan.self_timed:
        times = [sample.at or 0.0 for sample in samples]
    else:
        times = schedule.arrivals(plan.load, len(samples))
    return [
        Job(i, at, body)
        for i, (at, body) in enumerate(zip(times, _bodies(plan, samples, model), strict=True))
    ]


def _bodies(plan: Plan, samples: Sequence[Sample], model: str | None) -> list[bytes]:
    return bodies.build(
        samples,
        chat=plan.chat,
        model=model,
        fields=plan.sampling.fields(chat=plan.chat),
        dataset=plan.dataset,
        seed=plan.load.seed,
        text=plan.text,
    )


def _warm_up(plan: Plan, target: Target, samples: Sequence[Sample], model: str | None) -> None:
    """Requests like those of the run; where prompts are drawn, other ones, so that no cache is warmed."""
    count = plan.load.num_warmups
    if plan.dataset.dataset_name in GENERATED:
        warm: Sequence[Sample] = datasets.load(plan.dataset, count, plan.load.seed + 1, plan.text)
    else:
        warm = [samples[i % len(samples)] for i in range(count)]
    jobs = [Job(i, 0.0, body) for i, body in enumerate(_bodies(plan, warm, model))]
    processes.run([_work(plan, target, jobs, plan.load.max_concurrency or 0)], lambda done: None)


def _work(plan: Plan, target: Target, jobs: list[Job], concurrency: int) -> Work:
    return Work(
        host=target.host,
        port=target.port,
        tls=target.tls,
        verify=target.verify,
        head=target.head(),
        stream=plan.sampling.stream_response,
        jobs=jobs,
        concurrency=concurrency,
        timeout=plan.server.request_timeout,
    )


def _input_len(sample: Sample, record: Record) -> int:
    return record.prompt_tokens if record.prompt_tokens is not None else sample.prompt_len or 0


def _traffic(plan: Plan) -> list[str]:
    load = plan.load
    out = ["Starting main benchmark run..."]
    if plan.self_timed:
        out.append("Requests arrive as the trace says.")
    elif load.ramp_up_strategy is not None:
        out.append(
            f"Traffic ramp-up strategy: {load.ramp_up_strategy}, "
            f"from {load.ramp_up_start_rps:g} to {load.ramp_up_end_rps:g} requests a second"
        )
    else:
        out.append(f"Traffic request rate: {load.request_rate}")
        if not math.isinf(load.request_rate):
            kind = "Poisson process" if load.burstiness == 1.0 else "Gamma distribution"
            out.append(f"Burstiness factor: {load.burstiness} ({kind})")
    out.append(f"Maximum request concurrency: {load.max_concurrency}")
    return out


def file_stem(run: Run) -> str:
    """Name of the result's files without suffix, where the user gave none."""
    load = run.plan.load
    label = run.plan.report.label or run.plan.server.api
    concurrency = f"-concurrency{load.max_concurrency}" if load.max_concurrency is not None else ""
    rate = f"{load.request_rate}qps"
    if load.ramp_up_strategy is not None:
        rate = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps:g}qps-{load.ramp_up_end_rps:g}qps"
    model = run.model.rsplit("/", 1)[-1] or "model"
    return f"{label}-{rate}{concurrency}-{model}-{time.strftime('%Y%m%d-%H%M%S')}".replace("/", "_")
