"""A scheduler on a small device in one line, and what its tests ask again and again."""

from __future__ import annotations

from typing import Any

from pegainfer.contract.step import StepPlan
from pegainfer.engine.scheduler import SchedulerConfig
from tests.null.engine.harness import Driver, null_config


def driver(depth: int = 2, config: dict[str, Any] | None = None, **device: Any) -> Driver:
    return Driver(null_config(**device), SchedulerConfig(pipeline_depth=depth, **(config or {})))


def finish(d: Driver, request_id: str, index: int = 0) -> Any:
    event = d.answers[request_id, index].finish
    return event and event.finish


def ids(count: int, first: int = 0) -> list[int]:
    return [(first + i) % 20 for i in range(count)]


def prompt_tokens(plans: list[StepPlan], length: int) -> int:
    """Prompt positions computed over all plans."""
    return sum(max(0, min(r.start + r.count, length) - r.start) for plan in plans for r in plan.rows)
