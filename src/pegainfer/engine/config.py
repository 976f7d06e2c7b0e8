"""Options of the scheduler. The command line is derived from this class: a default stands only here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pegainfer.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled and requests are taken. The runner's own bounds hold besides."""

    max_prefill_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Prompt tokens computed a step; default: what the runner's step can take.",
            "parse": "count",
        },
    )
    target_itl_ms: float = field(
        default=100.0,
        metadata={
            "help": "Milliseconds between two tokens: prompts get what this leaves of a step, at measured "
            "prices; 0: as much as the step can take."
        },
    )
    max_slots: int | None = field(
        default=None, metadata={"help": "Sequences that run together; default: what the runner can hold."}
    )
    prefix_cache: bool = field(
        default=True, metadata={"help": "Reuse the KV of prompts with a common prefix."}
    )
    pipeline_depth: int = field(
        default=2,
        metadata={"help": "Plans that may be uncommitted at a time: 1, or 2 to hide the host's work."},
    )
    watermark: float = field(
        default=0.01, metadata={"help": "Share of the KV blocks that admissions leave to sequences that run."}
    )
    aging_seconds: float = field(
        default=30.0, metadata={"help": "Waiting for so long counts as one level of priority."}
    )
    max_waiting_requests: int = field(
        default=1024, metadata={"help": "Requests that may wait; more get 503."}
    )
    max_waiting_tokens: int = field(
        default=1 << 20, metadata={"help": "Prompt tokens that may wait, summed over requests; more get 503."}
    )
    max_wait_seconds: float = field(
        default=0.0,
        metadata={"help": "A request that was not started for so long is given up with 504; 0: never."},
    )
    peer_min_tokens: int = field(
        default=64,
        metadata={
            "help": "With --role decode: prompts that lack fewer tokens are computed here, not by a peer.",
            "parse": "count",
        },
    )
    max_n: int = field(default=128, metadata={"help": "Most continuations of one request."})
    max_logprobs: int = field(
        default=20, metadata={"help": "Most logprobs a position that a request may ask for."}
    )
    watchdog_seconds: float = field(
        default=60.0,
        metadata={
            "help": "An engine that makes no step for so long logs its last plan and every thread's stack; "
            "0: never."
        },
    )
    seed: int | None = field(
        default=None, metadata={"help": "Seed of the generator that draws the seeds of requests without one."}
    )

    def __post_init__(self) -> None:
        at_least_one = (
            "max_prefill_tokens",
            "max_slots",
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_n",
            "peer_min_tokens",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError("scheduler option too small", expected="≥ 1", got=value, where=name)
        if self.pipeline_depth not in (1, 2):
            raise ConfigError("bad pipeline depth", expected="1 or 2", got=self.pipeline_depth)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError("bad watermark", expected="0 ≤ watermark < 1", got=self.watermark)
        if not self.aging_seconds > 0.0:
            raise ConfigError(
                "bad aging", expected="seconds > 0", got=self.aging_seconds, where="aging_seconds"
            )
        for name in ("target_itl_ms", "max_wait_seconds", "watchdog_seconds"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ConfigError("no such time", expected="0 or more", got=value, where=name)
        if self.max_logprobs < 0:
            raise ConfigError(
                "bad logprobs bound", expected="≥ 0", got=self.max_logprobs, where="max_logprobs"
            )
