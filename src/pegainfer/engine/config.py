"""Options of the scheduler. The command line is derived from this class: a default stands only here."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled and requests are taken. The runner's own bounds hold besides."""

    max_prefill_tokens: int | None = None  # prompt tokens a step; None: what the runner's step can take
    max_slots: int | None = None  # sequences that run together; None: what the runner can hold
    pipeline_depth: int = 2  # plans that may be uncommitted at a time, 1 or 2
    prefix_cache: bool = True
    watermark: float = 0.01  # share of a group's blocks that admissions leave to those that run
    aging_seconds: float = 30.0  # waiting so long counts as one level of priority
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 20  # prompt tokens that wait, summed
    max_n: int = 128  # continuations a request
    max_logprobs: int = 20
    seed: int | None = (
        None  # of the generator that draws the seeds of requests without one; None: by the system
    )

    def __post_init__(self) -> None:
        at_least_one = (
            "max_prefill_tokens",
            "max_slots",
            "max_waiting_requests",
            "max_waiting_tokens",
            "max_n",
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
        if self.max_logprobs < 0:
            raise ConfigError(
                "bad logprobs bound", expected="≥ 0", got=self.max_logprobs, where="max_logprobs"
            )
