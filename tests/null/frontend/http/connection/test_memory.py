"""What requests left behind is freed once nothing is asked, and once only."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.connection import memory
from pegainfer.frontend.http.observation.metrics import FrontMetrics
from tests.support.asgi import spin


class Cycle:
    def __init__(self) -> None:
        self.me = self


def busy(registry: Registry, now: float) -> None:
    """As if a request came at `now` and ended."""
    registry.busy_since = now


def test_memory_is_given_back_once_after_each_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0)

    async def main() -> None:
        registry, metrics = Registry(), FrontMetrics()
        task = asyncio.create_task(memory.give_back_when_idle(registry, metrics))
        registry.idle.set()
        await spin(20)
        assert metrics.memory_trims == 0  # nothing was ever asked
        for count in (1, 2):
            busy(registry, float(count))
            while metrics.memory_trims < count:
                await asyncio.sleep(0)
            await spin(20)
            assert metrics.memory_trims == count
        registry.idle.clear()
        busy(registry, 3.0)
        await spin(20)
        assert metrics.memory_trims == 2  # a request is being answered
        task.cancel()

    asyncio.run(main())


def test_cycles_that_requests_left_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IDLE_SECONDS", 0)

    async def main() -> bool:
        registry, metrics = Registry(), FrontMetrics()
        left = weakref.ref(Cycle())
        registry.idle.set()
        task = asyncio.create_task(memory.give_back_when_idle(registry, metrics))
        await spin(20)
        busy(registry, 1.0)
        while not metrics.memory_trims:
            await asyncio.sleep(0)
        task.cancel()
        return left() is None

    gc.disable()
    try:
        assert asyncio.run(main())
    finally:
        gc.enable()


def test_a_server_that_started_without_the_collector_has_it_then() -> None:
    before = gc.get_threshold()
    gc.disable()
    try:
        memory.spare_the_collector()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        gc.enable()
