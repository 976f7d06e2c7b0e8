"""From records to figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pegainfer.bench.wire import Record

Floats = Sequence[float]


@dataclass(frozen=True)
class Distribution:
    """Of one metric, in milliseconds; zeros where there is no value."""

    mean: float
    median: float
    std: float  # of the population
    percentiles: tuple[tuple[float, float], ...]  # (p, value)

    @classmethod
    def of(cls, seconds: Floats, percentiles: Floats) -> Distribution:
        """Percentiles are interpolated linearly between the neighbours in order."""
        values = np.array(seconds or [0.0]) * 1000.0
        return cls(
            mean=float(values.mean()),
            median=float(np.median(values)),
            std=float(values.std()),
            percentiles=tuple((p, float(np.percentile(values, p))) for p in percentiles),
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a run came to. Rates are per second of `duration`."""

    duration: float  # seconds from the common start to the last answer
    completed: int
    failed: int
    total_input: int  # tokens of successful requests
    total_output: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None  # None where no bound was given
    peak_output: float  # most output tokens within one second of the run
    peak_concurrent: int
    distributions: dict[str, Distribution]  # by metric
    failures: dict[str, int]  # by reason, the most frequent first
    uncounted: int  # successful requests whose output the server did not count
    output_lens: list[int]  # by record, 0 where it failed
    tpots: list[float]  # by record, seconds; 0 where undefined


def output_len(record: Record) -> int:
    """Tokens of the answer: the server's count, else one for each event."""
    return record.output_tokens if record.output_tokens is not None else record.chunks


def figures(
    records: Sequence[Record],
    *,
    input_lens: Sequence[int],
    duration: float,
    percentiles: Floats,
    slos: dict[str, float],
) -> Figures:
    """Sums a run up.

    Args:
        records, input_lens: one a request, in one order; lengths in tokens.
        slos: most milliseconds by metric; a good request meets all of them.
    """
    outputs = [0 if r.error else output_len(r) for r in records]
    tpots = [(r.latency - r.ttft) / (n - 1) if n > 1 and r.ttft else 0.0
             for r, n in zip(records, outputs, strict=True)]  # fmt: skip
    good = [i for i, r in enumerate(records) if not r.error]
    won = [records[i] for i in good]
    total_input, total_output = sum(input_lens[i] for i in good), sum(outputs)
    values: dict[str, list[float]] = {
        "ttft": [r.ttft for r in won if r.ttft],
        "tpot": [tpots[i] for i in good if outputs[i] > 1 and records[i].ttft],
        "itl": [itl for r in won for itl in r.itls],
        "e2el": [r.latency for r in won],
        "client_queue_time": [r.queued for r in won],
        "e2el_including_client_queue": [r.latency + r.queued for r in won],
    }
    met = sum(_meets(records[i], tpots[i], slos) for i in good)
    return Figures(
        duration=duration,
        completed=len(won),
        failed=len(records) - len(won),
        total_input=total_input,
        total_output=total_output,
        request_throughput=len(won) / duration,
        output_throughput=total_output / duration,
        total_token_throughput=(total_input + total_output) / duration,
        request_goodput=met / duration if slos else None,
        peak_output=peak_output(won),
        peak_concurrent=peak_concurrent(won),
        distributions={name: Distribution.of(seconds, percentiles) for name, seconds in values.items()},
        failures=dict(Counter(r.error for r in records if r.error).most_common()),
        uncounted=sum(r.output_tokens is None for r in won),
        output_lens=outputs,
        tpots=tpots,
    )


def _meets(record: Record, tpot: float, slos: dict[str, float]) -> bool:
    seconds = {"ttft": record.ttft, "tpot": tpot, "e2el": record.latency}
    return all(seconds[name] * 1000.0 <= most for name, most in slos.items())


def peak_concurrent(records: Sequence[Record]) -> int:
    """Most requests in flight at one moment; one that ends as another starts does not overlap it."""
    edges = [(r.start, 1) for r in records] + [(r.start + r.latency, -1) for r in records]
    most = now = 0
    for _, step in sorted(edges):
        now += step
        most = max(most, now)
    return most


def token_times(record: Record) -> list[float]:
    """When each event came; the tokens of a body that was not streamed count at its end."""
    if not record.ttft:
        return [record.start + record.latency] * output_len(record)
    return [float(t) for t in record.start + record.ttft + np.cumsum([0.0, *record.itls])]


def peak_output(records: Sequence[Record]) -> float:
    """Most tokens within one of the run's seconds, counted from its first request."""
    if not records:
        return 0.0
    begin = min(r.start for r in records)
    seconds = Counter(math.floor(t - begin) for r in records for t in token_times(r))
    return float(max(seconds.values(), default=0))
