"""The engine handle in one process: sinks, refusals, drain, close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pegainfer.contract.errors import EngineDeadError, InvariantError, RequestError
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.handle import EngineInfo
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.engine.scheduler import SchedulerConfig
from pegainfer.null.runner import NullRunner
from tests.null.engine.harness import EOS, MODEL, null_config, request

PATIENCE = 30.0
INFO = EngineInfo(
    model="null",
    architecture="Null",
    device="null",
    vocab_size=32,
    max_model_len=64,
    block_size=4,
    num_blocks=64,
    max_slots=4,
)


class Inbox:
    """One request's sink."""

    def __init__(self, n: int = 1) -> None:
        self.events: list[TokenEvent] = []
        self.left = n
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, event: TokenEvent) -> None:
        self.events.append(event)
        self.begun.set()
        if event.finish is not None:
            self.left -= 1
            if not self.left:
                self.ended.set()

    def wait(self) -> list[TokenEvent]:
        assert self.ended.wait(PATIENCE)
        return self.events


Make = Callable[..., InProcessEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[InProcessEngine] = []

    def build(config: SchedulerConfig | None = None, **device: Any) -> InProcessEngine:
        engines.append(InProcessEngine(NullRunner(null_config(**device)), INFO, config))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def test_a_request_is_answered(make: Make) -> None:
    engine, box = make(), Inbox(2)
    req = request("r", [1, 2, 3], n=2)
    engine.submit(req, box)
    tokens = [t for e in box.wait() if e.index == 0 for t in e.tokens]
    assert tokens == MODEL.continuation([1, 2, 3], req.sampling, 7, eos_token_ids=(EOS,), max_model_len=64)
    assert engine.info is INFO
    assert engine.alive()


def test_many_threads_may_submit(make: Make) -> None:
    engine = make()
    boxes = {f"r{i}": Inbox() for i in range(40)}

    def submit(names: list[str]) -> None:
        for name in names:
            engine.submit(request(name, [1, 2], max_tokens=5, eos=()), boxes[name])

    threads = [threading.Thread(target=submit, args=(list(boxes)[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for box in boxes.values():
        assert sum(len(e.tokens) for e in box.wait()) == 5
    for thread in threads:
        thread.join()


def test_a_refusal_is_an_error_event_of_each_index(make: Make) -> None:
    engine, box = make(), Inbox(3)
    engine.submit(request("r", [99], n=3), box)
    events = box.wait()
    assert [(e.index, e.finish, e.error_kind, e.error_param) for e in events] == [
        (i, FinishReason.ERROR, "RequestError", "prompt") for i in range(3)
    ]
    engine.submit(request("r", [9], max_tokens=1), Inbox())  # the id is free again


def test_a_full_queue_says_when_to_retry(make: Make) -> None:
    engine = make(SchedulerConfig(max_waiting_tokens=3), max_slots=1, step_seconds=0.01)
    engine.submit(request("a", [1, 2, 3], max_tokens=40, eos=()), Inbox())
    boxes = [Inbox() for _ in range(3)]
    for i, box in enumerate(boxes):
        engine.submit(request(f"b{i}", [1, 2, 3], max_tokens=1), box)
    (event,) = boxes[2].wait()
    assert (event.error_kind, event.retry_after >= 1.0) == ("QueueFullError", True)


def test_a_live_id_is_refused_at_once(make: Make) -> None:
    engine = make(step_seconds=0.005)
    box = Inbox()
    engine.submit(request("r", [1, 2], max_tokens=30, eos=()), box)
    with pytest.raises(RequestError):
        engine.submit(request("r", [1, 2]), Inbox())
    assert sum(len(e.tokens) for e in box.wait()) == 30


def test_a_failing_sink_harms_no_other(make: Make) -> None:
    engine, box = make(), Inbox()

    def bad(event: TokenEvent) -> None:
        raise ValueError("sink")

    engine.submit(request("bad", [1, 2], max_tokens=9, eos=()), bad)
    engine.submit(request("good", [1, 2], max_tokens=9, eos=()), box)
    assert sum(len(e.tokens) for e in box.wait()) == 9
    assert engine.alive()


def test_cancel_ends_a_request_once(make: Make) -> None:
    engine, box = make(step_seconds=0.002), Inbox()
    engine.submit(request("r", [1, 2], max_tokens=60, eos=()), box)
    engine.cancel("r")
    engine.cancel("r")
    assert box.wait()[-1].finish is FinishReason.ABORT
    engine.drain()
    assert engine.wait_drained(PATIENCE)
    assert sum(e.finish is not None for e in box.events) == 1


def test_drain_and_close(make: Make) -> None:
    engine, old, new = make(), Inbox(), Inbox()
    engine.submit(request("old", [1, 2], max_tokens=20, eos=()), old)
    engine.drain()
    engine.submit(request("new", [1, 2]), new)
    assert new.wait()[0].error_kind == "QueueFullError"
    assert engine.wait_drained(PATIENCE)
    assert sum(len(e.tokens) for e in old.wait()) == 20
    engine.close()
    assert not engine.alive()
    with pytest.raises(EngineDeadError):
        engine.submit(request("late", [1]), Inbox())


def test_death_ends_every_live_request(make: Make) -> None:
    engine, box = make(faults=lambda plan: InvariantError("a bug") if plan.step == 2 else None), Inbox(2)
    engine.submit(request("r", [1, 2], n=2, max_tokens=20, eos=()), box)
    events = [e for e in box.wait() if e.finish is not None]
    assert [e.error_kind for e in events] == ["EngineDeadError"] * 2
    engine.wait_drained(PATIENCE)
    with pytest.raises(EngineDeadError):
        engine.submit(request("late", [1]), Inbox())
