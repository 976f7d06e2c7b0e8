"""What the server's own host did during a run, where its /metrics tell: stages, steps, cache hits."""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.bench.target import ASK_SECONDS, Target

# One sample of the Prometheus text format, whatever stands before a colon in its name.
_SAMPLE = re.compile(rb"^(?:\w+:)?(\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", re.MULTILINE)
_STAGE = re.compile(rb'(?:stage|kind)="(\w+)"')
_WANTED = (
    b"host_seconds_total",
    b"step_seconds_count",
    b"step_seconds_sum",
    b"prefix_cache_queries_total",
    b"prefix_cache_hits_total",
)
Samples = Mapping[tuple[str, str], float]  # by name and stage or kind


@dataclass(frozen=True)
class ServerCost:
    """Of one run."""

    host_seconds: dict[str, float]  # by stage
    steps: int
    step_seconds: float
    kinds: dict[str, tuple[int, float]]  # steps of a kind (decode, prefill, mixed) and their seconds
    cached_share: float | None  # of the prompt tokens that were looked up; None where none was

    @classmethod
    def between(cls, before: Samples, after: Samples) -> ServerCost | None:
        """None where the server does not count its host's time, or was started anew meanwhile."""
        gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
        seconds = {stage: gain for (name, stage), gain in gained.items() if name == "host_seconds_total"}
        if not seconds or min(gained.values()) < 0:
            return None

        def total(name: str) -> float:
            return sum(gain for (found, _), gain in gained.items() if found == name)

        kinds = {
            kind: (round(count), gained.get(("step_seconds_sum", kind), 0.0))
            for (name, kind), count in gained.items()
            if name == "step_seconds_count" and count
        }
        queries = total("prefix_cache_queries_total")
        return cls(
            host_seconds=seconds,
            steps=round(total("step_seconds_count")),
            step_seconds=total("step_seconds_sum"),
            kinds=kinds,
            cached_share=total("prefix_cache_hits_total") / queries if queries else None,
        )


def scrape(target: Target) -> Samples:
    """The wanted samples of the server's /metrics; none where it has no such page."""
    connection = target.connect(ASK_SECONDS)
    try:
        headers = {n: v for n, v in target.headers.items() if n not in ("Content-Type", "Accept")}
        connection.request("GET", target.path("/metrics"), headers=headers)
        answer = connection.getresponse()
        return parse(answer.read()) if answer.status == 200 else {}
    except (OSError, http.client.HTTPException, ssl.SSLError):
        return {}
    finally:
        connection.close()


def parse(page: bytes) -> Samples:
    """The wanted samples of a page in Prometheus' text format, by name and stage."""
    out: dict[tuple[str, str], float] = {}
    for name, labels, value in _SAMPLE.findall(page):
        if name in _WANTED:
            stage = _STAGE.search(labels)
            out[name.decode(), stage[1].decode() if stage else ""] = float(value)
    return out
