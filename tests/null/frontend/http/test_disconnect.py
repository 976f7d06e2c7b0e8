"""A client that leaves frees what it held, at once and wherever it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.asgi import Call, ask, make_app, run, spin
from tests.support.fake_engine import FakeEngine, says

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "bc"], "n": 2}),
    ("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
]


def assert_empty(engine: FakeEngine, app: Any) -> None:
    assert engine.num_live == 0
    assert app.num_live == 0
    assert app.front.gate.waiting_requests == app.front.gate.waiting_tokens == 0
    assert app.front.registry.idle.is_set()


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_disconnect_cancels_every_prompt(path: str, body: dict[str, Any], steps: int) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, path, body)
        await spin()
        for _ in range(steps):
            engine.step()
            await spin()
        live = engine.num_live
        assert live == len(engine.requests)
        call.disconnect()
        await call.task
        assert len(engine.cancelled) == live
        assert not call.ended
        assert_empty(engine, app)

    run(main)


def test_a_disconnect_while_the_body_is_read() -> None:
    engine = FakeEngine()

    async def main() -> None:
        messages = [
            {"type": "http.request", "body": b'{"pro', "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            raise AssertionError("nobody is there to read this")

        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
        await make_app(engine)(scope, receive, send)
        assert not engine.requests

    run(main)


def test_a_disconnect_of_a_reader_that_does_not_read() -> None:
    """The write hangs; the engine must not wait for it."""
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": "a", "stream": True})
        await spin()
        reads = asyncio.Event()
        call.gate = reads.wait  # type: ignore[assignment]
        engine.step()
        await spin()
        call.disconnect()
        await spin()
        assert engine.num_live == 0
        reads.set()
        await call.task
        assert_empty(engine, app)

    run(main)


def test_a_disconnect_in_the_last_moment_changes_nothing() -> None:
    engine = FakeEngine()

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
        await call.until(lambda: call.ended)
        call.disconnect()
        await call.task
        assert engine.cancelled == []
        assert_empty(engine, app)

    run(main)


def test_two_hundred_in_a_row() -> None:
    engine = FakeEngine(says("x" * 100), paused=True)

    async def main() -> None:
        app = make_app(engine)
        before = asyncio.all_tasks()
        for _ in range(200):
            call = Call(app, "/v1/completions", {"prompt": "a", "stream": True})
            await spin(5)
            engine.step()
            await call.until(lambda call=call: bool(call.writes))  # type: ignore[misc]
            call.disconnect()
            await call.task
        assert len(engine.cancelled) == 200
        assert_empty(engine, app)
        assert asyncio.all_tasks() == before
        engine.resume()
        call = Call(app, "/v1/completions", {"prompt": "a", "max_tokens": 3})
        await call.task
        assert call.status == 200

    run(main)


def test_a_failed_submit_leaves_nothing_behind() -> None:
    """The second of three prompts is refused: the first is cancelled, the place in the queue given back."""
    from pegainfer.contract.errors import QueueFullError

    engine = FakeEngine(paused=True)
    submit = engine.submit

    def second_fails(request: Any, sink: Any) -> None:
        if len(engine.requests) == 1:
            raise QueueFullError("full")
        submit(request, sink)

    engine.submit = second_fails  # type: ignore[method-assign]

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": ["a", "b", "c"]})
        await call.task
        assert call.status == 503
        assert len(engine.cancelled) == 1
        assert_empty(engine, app)

    run(main)


def test_an_unexpected_failure_of_submit_leaves_nothing_behind() -> None:
    engine = FakeEngine(paused=True)
    engine.refuse = ValueError("a bug")
    app_seen = []

    async def main() -> None:
        app = make_app(engine)
        app_seen.append(app)
        call = Call(app, "/v1/completions", {"prompt": "a"})
        await call.task
        assert call.status == 500
        assert_empty(engine, app)

    run(main)
    assert app_seen


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passed_is_a_504(stream: bool) -> None:
    from pegainfer.contract.event import FinishReason, TokenEvent

    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": "a", "timeout": 1e-6, "stream": stream})
        await spin()
        request_id = engine.requests[0].id
        event = TokenEvent(
            request_id=request_id,
            finish=FinishReason.ERROR,
            error="the deadline passed",
            error_kind="DeadlineError",
        )
        engine.fail(request_id, event)
        await call.task
        assert call.status == 504
        assert b'"code":"timeout"' in call.body
        assert_empty(engine, app)

    run(main)


def test_shutdown_aborts_what_is_left() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        calls = [Call(app, "/v1/completions", {"prompt": "a", "stream": s}) for s in (True, False)]
        await spin()
        engine.step()
        await spin()
        app.abort_all()
        for call in calls:
            await call.task
            assert b'"finish_reason":"abort"' in call.body
        assert_empty(engine, app)

    run(main)


def test_events_from_another_thread_are_taken_over() -> None:
    """As from an engine in the same process, whose loop runs in a thread of its own."""
    import threading

    class Threaded(FakeEngine):
        def _schedule(self) -> None:
            threading.Thread(target=self._all).start()

        def _all(self) -> None:
            while self.num_live:
                self.step()

    response = ask(Threaded(says("hello")), "/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 5})
    assert [c["text"] for c in response.json()["choices"]] == ["hello"] * 3


def test_a_reader_that_reads_nothing_is_dropped() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, write_seconds=0.01)
        call = Call(app, "/v1/completions", {"prompt": "a", "stream": True})
        await spin()
        engine.step()
        await call.until(lambda: bool(call.writes))
        call.gate = asyncio.Event().wait  # type: ignore[assignment]
        engine.step()
        await call.task
        assert engine.num_live == 0
        assert_empty(engine, app)

    run(main)
