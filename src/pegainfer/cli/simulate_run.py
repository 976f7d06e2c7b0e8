"""A simulated run of a workload of `bench serve`, as the Run that its report, JSON and page are made from."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pegainfer.bench import datasets, schedule
from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig, ServerConfig
from pegainfer.bench.datasets import Sample, TextTool
from pegainfer.bench.metrics import figures
from pegainfer.bench.run import Plan, Run
from pegainfer.bench.server_cost import ServerCost
from pegainfer.bench.wire import Record
from pegainfer.contract.errors import ConfigError
from pegainfer.contract.event import EngineStats
from pegainfer.contract.request import GREEDY_BELOW, GenerateRequest, SamplingParams, pack_tokens
from pegainfer.simulate.replay import Arrival, Outcome, Replay, Usage

if TYPE_CHECKING:
    from collections import Counter

    from pegainfer.app.simulation import SimulatedEngine
    from pegainfer.measure.prices import StepWork


@dataclass(frozen=True)
class Workload:
    """What `bench serve` would send; `text` as bench.run.Plan has it."""

    model: str
    load: LoadConfig
    dataset: DatasetConfig
    sampling: SamplingConfig
    report: ReportConfig
    text: TextTool | None


@dataclass(frozen=True)
class Simulated:
    run: Run
    usage: Usage
    works: Counter[StepWork]


def sampling_case(sampling: SamplingConfig) -> str:
    """The setting of `sample_tokens` whose price the requests' sampling takes; a server's default is 1.0."""
    if sampling.temperature is not None and sampling.temperature < GREEDY_BELOW:
        return "greedy"
    if sampling.top_k or (sampling.top_p or 1.0) < 1.0:
        parts = ["top_k 40"] if sampling.top_k else []
        parts += ["top_p 0.9"] if (sampling.top_p or 1.0) < 1.0 else []
        return ", ".join(parts)
    return "min_p 0.1" if sampling.min_p else "temperature 0.8"


def run(engine: SimulatedEngine, workload: Workload) -> Simulated:
    """Runs the workload. Raises ConfigError for a dataset that cannot be used."""
    plan = Plan(
        server=ServerConfig(),
        load=workload.load,
        dataset=workload.dataset,
        sampling=workload.sampling,
        report=workload.report,
        text=workload.text,
    )
    samples = datasets.load(plan.dataset, plan.load.num_prompts, plan.load.seed, plan.text)
    timed = [s.at or 0.0 for s in samples]
    times = timed if plan.self_timed else schedule.arrivals(plan.load, len(samples))
    requests = [request_of(i, sample, plan.text) for i, sample in enumerate(samples)]
    arrivals = [Arrival(at, request) for at, request in zip(times, requests, strict=True)]
    policy, runner = engine.start()
    outcomes, usage = Replay(policy, runner, engine.host, arrivals, plan.load.max_concurrency).run()
    lens = [len(a.request.prompt) // 4 for a in arrivals]
    records = [_record(i, o, n) for i, (o, n) in enumerate(zip(outcomes, lens, strict=True))]
    done = Run(
        plan=plan,
        model=workload.model,
        start=0.0,
        records=records,
        input_lens=lens,
        mismatched=0,
        figures=figures(
            records,
            input_lens=lens,
            duration=max(usage.seconds, 1e-9),
            percentiles=plan.report.percentiles(),
            slos=plan.report.slos(),
        ),
        cost=None,
        probe=None,
        server=_server(policy.stats(), usage),
    )
    return Simulated(done, usage, runner.works)


def request_of(index: int, sample: Sample, text: TextTool | None) -> GenerateRequest:
    """A greedy request: what is drawn does not matter, and every answer reaches its full length."""
    ids = sample.prompt
    if isinstance(ids, str):
        if text is None:
            raise ConfigError("a prompt is a text", where=f"request {index}", remedy="give --tokenizer")
        ids = text.encode(ids)
    sampling = SamplingParams(temperature=0.0, max_tokens=sample.output_len, ignore_eos=True)
    return GenerateRequest(id=str(index), prompt=pack_tokens(ids), sampling=sampling)


def _record(index: int, outcome: Outcome, prompt: int) -> Record:
    times = outcome.tokens
    return Record(
        index=index,
        start=outcome.sent,
        queued=outcome.sent - outcome.wanted,
        ttft=times[0] - outcome.sent if times else 0.0,
        latency=outcome.end - outcome.sent,
        itls=[b - a for a, b in pairwise(times)],
        chunks=len(times),
        prompt_tokens=prompt,
        output_tokens=sum(outcome.counts),
        error=outcome.error,
    )


def _server(stats: EngineStats, usage: Usage) -> ServerCost:
    kinds = {k: (n, stats.kind_seconds[k]) for k, n in stats.kind_steps.items() if n}
    share = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None
    return ServerCost({"engine": usage.host}, usage.steps, usage.device, kinds, share)
