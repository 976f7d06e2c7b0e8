"""What observers are told of requests: answered, refused, streamed, broken off."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pegainfer.contract.observation import FailureObserver, Observer, RequestRecord
from tests.support.asgi import Call, client, make_app, run, spin
from tests.support.fake_engine import FakeEngine, says

COMPLETION = {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 3, "temperature": 0.5, "request_id": "mine"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(stream: bool) -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        app = make_app(FakeEngine(says("hello")), observers=[records.append])
        async with client(app, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01") as http:
            body = {**COMPLETION, "stream": stream}
            answer = await http.post("/v1/completions?key=secret", json=body)
        (record,) = records
        assert (record.method, record.path, record.status) == ("POST", "/v1/completions", 200)
        assert record.num_bytes == len(answer.content)
        assert (record.model, record.prompt_tokens, record.completion_tokens) == ("fake", 5, 12)
        assert record.finish == ("length",) * 4
        assert (record.temperature, record.max_tokens) == (0.5, 3)
        assert 0 < record.first_token <= record.seconds < 60
        assert record.traceparent.startswith("00-aaaa") and "mine" in record.id
        assert not record.gone

    run(main)


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature: expected "),
        ("/v1/nowhere", {}, 404, "/v1/nowhere: no such route"),
        ("/v1/models", {}, 405, "/v1/models: expected "),
        ("/v1/chat/completions", {"messages": []}, 400, "messages: expected "),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, 400, "m"),
    ],
)
def test_what_is_refused(path: str, body: dict[str, Any], status: int, reason: str) -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        app = make_app(FakeEngine(), observers=[records.append])
        async with client(app) as http:
            answer = await http.post(path, content=json.dumps(body))
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == records[0].error  # what the client is told

    run(main)
    (record,) = records
    assert record.error.startswith(reason)
    assert (record.status, record.path, record.completion_tokens, record.model) == (status, path, 0, "")


def test_without_a_key() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        app = make_app(FakeEngine(), observers=[records.append], api_key=("k",))
        async with client(app) as http:
            await http.get("/metrics")

    run(main)
    assert [(r.status, r.error[:13]) for r in records] == [(401, "Authorization")]


def test_what_fails_in_the_middle_of_a_stream() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        engine = FakeEngine(paused=True)
        app = make_app(engine, observers=[records.append])
        call = Call(app, "/v1/completions", {"prompt": "abc", "stream": True})
        await spin()
        engine.step()
        await spin()
        engine.die()
        await call.task

    run(main)
    (record,) = records
    assert (record.status, record.completion_tokens) == (200, 1)
    assert record.error == "the engine process has ended"


def test_bytes_that_are_no_request() -> None:
    records: list[RequestRecord] = []
    make_app(FakeEngine(), observers=[records.append]).refused(400, "1.2.3.4", "not an HTTP/1.1 request")
    (record,) = records
    assert (record.status, record.client, record.error) == (400, "1.2.3.4", "not an HTTP/1.1 request")


def test_a_client_that_leaves() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        engine = FakeEngine(paused=True)
        app = make_app(engine, observers=[records.append])
        call = Call(app, "/v1/completions", {"prompt": "abc", "stream": True})
        await spin()
        engine.step()
        await spin()
        call.disconnect()
        await call.task

    run(main)
    (record,) = records
    assert record.gone and (record.prompt_tokens, record.completion_tokens, record.finish) == (3, 1, ())


def test_a_broken_observer_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    records: list[RequestRecord] = []

    def broken(record: RequestRecord) -> None:
        raise ValueError("no")

    async def main() -> None:
        app = make_app(FakeEngine(), observers=[broken, records.append])
        async with client(app) as http:
            for _ in range(3):
                assert (await http.get("/health")).status_code == 200

    run(main)
    assert len(records) == 3
    assert caplog.text.count("an observer of requests has failed") == 1


def test_paths_are_bounded() -> None:
    records: list[RequestRecord] = []

    async def main() -> None:
        app = make_app(FakeEngine(), observers=[records.append])
        async with client(app) as http:
            await http.get("/" + "x" * 5000)

    run(main)
    assert records[0].path == "/" + "x" * 255


class Failures(FailureObserver):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def __call__(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("traced", [False, True])
def test_an_observer_of_failures(traced: bool) -> None:
    failures, records = Failures(), list[RequestRecord]()

    async def main() -> None:
        observers: list[Observer] = [failures, records.append] if traced else [failures]
        app = make_app(FakeEngine(says("hello")), observers=observers)
        async with client(app) as http:
            assert (await http.post("/v1/completions", json={"prompt": "ab"})).status_code == 200
            assert (await http.post("/v1/completions", json={"prompt": 1})).status_code == 400
            assert (await http.post("/v1/models/none", json={})).status_code == 405

    run(main)
    assert [(r.status, r.method, r.path) for r in failures.records] == [
        (400, "POST", "/v1/completions"),
        (405, "POST", "/v1/models/none"),
    ]
    first = failures.records[0]
    assert first.error.startswith("prompt: expected") and 0 < first.seconds < 60
    assert abs(first.began - time.time()) < 60 and abs(first.clock - time.monotonic()) < 60
    assert len(records) == (3 if traced else 0)


def test_an_observer_of_failures_sees_a_stream_that_breaks() -> None:
    failures = Failures()

    async def main() -> None:
        engine = FakeEngine(paused=True)
        app = make_app(engine, observers=[failures])
        call = Call(app, "/v1/completions", {"prompt": "abc", "stream": True})
        await spin()
        engine.step()
        await spin()
        engine.die()
        await call.task

    run(main)
    (record,) = failures.records
    assert (record.status, record.error) == (200, "the engine process has ended")
