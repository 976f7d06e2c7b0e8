"""What /metrics shows. Recording is plain arithmetic on the event loop; the text is made on demand.

Engine counters are read from the engine's own snapshot, so a name is exported only where something counts it.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pegainfer.contract.event import PRICE_RATIOS, SLOW_RATIO, EngineStats, FinishReason, Timings
from pegainfer.contract.handle import EngineHandle
from pegainfer.frontend.http.observation.expert_metrics import expert_metrics
from pegainfer.frontend.http.observation.rank_metrics import rank_metrics
from pegainfer.frontend.http.observation.tier_metrics import tier_families
from pegainfer.frontend.pieces import PieceCache
from pegainfer.frontend.processes import process_family, resident_bytes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

SHORT = (  # seconds
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
LONG = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0
)  # fmt: skip
LAG_PERIOD = 0.05  # seconds
LAG = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REFUSALS = ("overloaded", "rate_limited", "engine_dead", "timeout")  # codes of errors: the request was right
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": (
        "From a request's arrival to its first token.",
        (*SHORT, 20.0, 40.0, 80.0),
    ),
    "inter_token_latency_seconds": ("Between two deliveries of one continuation.", SHORT),
    "request_time_per_output_token_seconds": ("A request's mean time a token after the first.", SHORT),
    "e2e_request_latency_seconds": ("From arrival to the last token.", LONG),
    "request_queue_time_seconds": ("From arrival to the first step.", LONG),
    "request_prefill_time_seconds": ("From the first step to the first token.", LONG),
    "request_decode_time_seconds": ("From the first token to the last.", LONG),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of a continuation.", TOKENS),
    "event_loop_lag_seconds": ("How late the HTTP front's event loop wakes, seen 20 times a second.", LAG),
}

# Fields of EngineStats that only grow: name without _total, help.
ENGINE_COUNTERS: dict[str, tuple[str, str]] = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of the requests that were scheduled."),
    "cached_tokens": ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "slow_steps": (
        "step_slower_than_price",
        f"Steps that took {SLOW_RATIO} times the price that earlier steps had set, or more.",
    ),
    "adapter_loads": ("lora_loads", "LoRA adapters that were brought into a slot of the device."),
    "preemptions": ("num_preemptions", "Sequences that lost their blocks to another."),
}


class Histogram:
    """Counts of observations by upper bound. Not for several threads."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many values are ≤ it), as Prometheus wants it; the last bound is "+Inf"."""
        bounds = (*map(str, self.bounds), "+Inf")
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))


class FrontMetrics:
    """What the front itself measures. One object an app."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.first_token = self.histograms["time_to_first_token_seconds"]
        self.inter_token = self.histograms["inter_token_latency_seconds"]
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        # From 0 on: who watches rates sees no first refusal of a series that begins with it.
        self.rejected = dict.fromkeys(REFUSALS, 0)
        self.memory_trims = 0
        self.started = time.monotonic()
        self.recording = False  # a trace is being taken
        self.host_seconds: dict[str, float] = {
            "tokenize": 0.0,
            "template": 0.0,
            "grammar": 0.0,
            "detokenize": 0.0,
        }

    async def watch_loop(self) -> None:
        """Notes how late a sleep ends, until cancelled."""
        lag, loop = self.histograms["event_loop_lag_seconds"], asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            lag.observe(max(0.0, loop.time() - due))

    def reject(self, reason: str) -> None:
        """`reason`: one of REFUSALS."""
        self.rejected[reason] += 1

    def abandon(self, choices: int) -> None:
        """So many continuations were given up: their client left, or their request failed."""
        self.finished[FinishReason.ABORT.value] += choices

    def finish(
        self, reason: str, prompt_tokens: int, tokens: int, timings: Timings | None, now: float
    ) -> None:
        """One continuation ended; `now` is when the front knew."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        seen = self.histograms
        seen["request_prompt_tokens"].observe(prompt_tokens)
        seen["request_generation_tokens"].observe(tokens)
        if timings is None:
            return
        t = timings
        seen["e2e_request_latency_seconds"].observe(now - t.arrival)
        if t.scheduled > 0:
            seen["request_queue_time_seconds"].observe(t.scheduled - t.arrival)
            if t.first_token > 0:
                seen["request_prefill_time_seconds"].observe(t.first_token - t.scheduled)
        if t.first_token > 0 and t.finished > 0:
            seen["request_decode_time_seconds"].observe(t.finished - t.first_token)
            if tokens > 1:
                mean = (t.finished - t.first_token) / (tokens - 1)
                seen["request_time_per_output_token_seconds"].observe(mean)


def registry_of(collector: Any) -> CollectorRegistry:
    """Prometheus' registry of one collector."""
    # Imported here: a server's start should not pay for a page that may never be read.
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def rendered(registry: CollectorRegistry) -> bytes:
    """What GET /metrics answers."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(registry)


class MetricsPage:
    """A prometheus collector over the front's figures and the engine's latest snapshot."""

    def __init__(
        self, front: FrontMetrics, engine: EngineHandle, pieces: PieceCache, model: str, prefix: str
    ) -> None:
        self._front = front
        self._engine = engine
        self._pieces = pieces
        self._model = model
        self._prefix = prefix
        self._registry: CollectorRegistry | None = None

    def render(self) -> bytes:
        if self._registry is None:
            self._registry = registry_of(self)
        return rendered(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield from tier_families(self._prefix, self._model, stats)
        yield from self._histograms()
        yield self._step_tokens(stats)
        yield self._price_ratios(stats)
        if stats.experts is not None:
            yield from expert_metrics(stats.experts, self._model, self._prefix)
        if stats.rank_seconds:
            yield from rank_metrics(stats.rank_seconds, self._model, self._prefix)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        for name, text, value in (
            ("num_requests_running", "Sequences that hold a slot.", stats.running),
            ("num_requests_waiting", "Sequences that wait for one.", stats.waiting),
            ("trace_recording", "1 while a trace is being taken.", float(self._front.recording)),
            ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", used),
            ("uptime_seconds", "Since the front was made.", time.monotonic() - self._front.started),
            (
                "resident_memory_bytes",
                "Host memory resident in the server's processes.",
                resident_bytes(process_family(os.getpid())),
            ),
        ):
            yield self._one(GaugeMetricFamily, name, text, value)
        info = GaugeMetricFamily(
            self._prefix + "engine_info",
            "1; its labels say what serves.",
            labels=["model_name", "architecture", "device"],
        )
        info.add_metric([self._model, self._engine.info.architecture, self._engine.info.device], 1)
        yield info
        startup = GaugeMetricFamily(
            self._prefix + "startup_seconds", "The engine's start by phase.", labels=["model_name", "phase"]
        )
        for phase, seconds in self._engine.info.startup_seconds.items():
            startup.add_metric([self._model, phase], seconds)
        yield startup

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, SummaryMetricFamily

        for field, (name, text) in ENGINE_COUNTERS.items():
            yield self._one(CounterMetricFamily, name, text, getattr(stats, field))
        for name, text, count in (
            ("tokenizer_cache_queries", "Characters of long texts to tokenise.", self._pieces.chars),
            ("tokenizer_cache_hits", "Of them, those known from earlier texts.", self._pieces.known_chars),
            ("memory_trims", "Times that idle memory was given back.", self._front.memory_trims),
        ):
            yield self._one(CounterMetricFamily, name, text, count)
        host = {**stats.host_seconds, **self._front.host_seconds}
        for name, label, text, values in (
            ("request_success", "finished_reason", "Continuations that ended.", self._front.finished),
            ("admission_rejections", "reason", "Requests not taken.", self._front.rejected),
            ("host_seconds", "stage", "Host time by stage.", host),
        ):
            family = CounterMetricFamily(self._prefix + name, text, labels=["model_name", label])
            for key, value in values.items():
                family.add_metric([self._model, key], value)
            yield family
        steps = SummaryMetricFamily(
            self._prefix + "step_seconds", "Wall time of the engine's steps.", labels=["model_name", "kind"]
        )
        for kind, count in stats.kind_steps.items():
            steps.add_metric([self._model, kind], count_value=count, sum_value=stats.kind_seconds[kind])
        yield steps

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import HistogramMetricFamily

        for name, (text, _) in _HISTOGRAMS.items():
            histogram = self._front.histograms[name]
            family = HistogramMetricFamily(self._prefix + name, text, labels=["model_name"])
            family.add_metric([self._model], histogram.cumulative(), histogram.total)
            yield family

    def _step_tokens(self, stats: EngineStats) -> Metric:
        from prometheus_client.metrics_core import HistogramMetricFamily

        text = "Tokens computed in a step."
        family = HistogramMetricFamily(self._prefix + "iteration_tokens_total", text, labels=["model_name"])
        sums = list(itertools.accumulate(stats.step_sizes)) or [0]
        bounds = [str(2.0**i - 1) for i in range(len(sums) - 1)]
        buckets = list(zip([*bounds, "+Inf"], map(float, sums), strict=True))
        family.add_metric([self._model], buckets, stats.step_tokens)
        return family

    def _price_ratios(self, stats: EngineStats) -> Metric:
        from prometheus_client.metrics_core import HistogramMetricFamily

        text = "Device time of a step over its price; of all steps with a prompt and a sample of the others."
        family = HistogramMetricFamily(self._prefix + "step_price_ratio", text, labels=["model_name"])
        counts = stats.price_ratios or (0,) * (len(PRICE_RATIOS) + 1)
        bounds = (*map(str, PRICE_RATIOS), "+Inf")
        buckets = list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True))
        family.add_metric([self._model], buckets, stats.price_ratio_sum)
        return family

    def _one(self, kind: type[Any], name: str, text: str, value: float) -> Metric:
        family = kind(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        metric: Metric = family
        return metric
