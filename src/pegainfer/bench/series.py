"""What the plots show, as numbers: both the page and the PNG draw from these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pegainfer.bench.metrics import token_times
from pegainfer.bench.run import Run

CDF_POINTS = 400
RATE_BINS = 120
MAX_BARS = 2000  # requests in the timeline; of more, evenly spaced ones are shown

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One request in the timeline; seconds since the start of the run."""

    index: int
    arrived: float
    sent: float
    first: float  # first token; the end where the answer was not streamed
    end: float
    error: str


@dataclass(frozen=True)
class Series:
    cdfs: dict[str, Points]  # by metric: (milliseconds, share of values ≤ it)
    bars: list[Bar]
    tokens: Points  # (seconds, output tokens a second)
    finished: Points  # (seconds, requests that ended a second)
    running: Points  # (seconds, requests in flight)
    left_out: int  # requests without a bar


def series(run: Run) -> Series:
    """The curves and bars of a run; times are seconds since its start."""
    records, start = run.records, run.start
    won = [r for r in records if not r.error]
    values = {
        "TTFT": [r.ttft for r in won if r.ttft],
        "TPOT": [t for t in run.figures.tpots if t],
        "ITL": [itl for r in won for itl in r.itls],
        "E2EL": [r.latency for r in won],
    }
    span = max(run.figures.duration, 1e-3)
    chosen = range(len(records))
    if len(records) > MAX_BARS:
        chosen = range(0, len(records), -(-len(records) // MAX_BARS))
    bars = []
    for i in chosen:
        r = records[i]
        sent = r.start - start
        first = sent + (r.ttft or r.latency)
        bars.append(Bar(r.index, sent - r.queued, sent, first, sent + r.latency, r.error))
    times = [t - start for r in won for t in token_times(r)]
    ends = [r.start + r.latency - start for r in won]
    return Series(
        cdfs={name: cdf(numbers) for name, numbers in values.items() if numbers},
        bars=bars,
        tokens=rate(times, span),
        finished=rate(ends, span),
        running=in_flight([(r.start - start, r.start - start + r.latency) for r in won], span),
        left_out=len(records) - len(bars),
    )


def cdf(seconds: list[float]) -> Points:
    """Steps of the distribution in milliseconds, thinned to CDF_POINTS."""
    ordered = np.sort(np.array(seconds)) * 1000.0
    picks = np.unique(np.linspace(0, len(ordered) - 1, CDF_POINTS).round().astype(int))
    return [(float(ordered[i]), (int(i) + 1) / len(ordered)) for i in picks]


def rate(times: list[float], span: float) -> Points:
    """Events a second in equal bins over `span` seconds."""
    bins = max(1, min(RATE_BINS, int(span / 0.05)))
    counts, edges = np.histogram(times, bins=bins, range=(0.0, span))
    width = span / bins
    return [(float(edge + width / 2), float(n / width)) for edge, n in zip(edges, counts, strict=False)]


def in_flight(spans: list[tuple[float, float]], span: float) -> Points:
    """Requests in flight at evenly spaced moments."""
    starts = np.sort([s for s, _ in spans])
    ends = np.sort([e for _, e in spans])
    moments = np.linspace(0.0, span, RATE_BINS)
    counts = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
    return [(float(t), float(n)) for t, n in zip(moments, counts, strict=True)]
