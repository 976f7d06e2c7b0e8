"""POST /debug/trace and GET /debug/slow: who may ask, what comes, and that nothing is recorded otherwise."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pegainfer.contract.observation import RequestRecord
from pegainfer.contract.trace import StepTrace
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TEMPLATE, TOKENIZER, client, run
from tests.support.fake_engine import FakeEngine, says

ROUTES = [("POST", "/debug/trace"), ("GET", "/debug/slow")]
ADMIN = {"authorization": "Bearer boss"}


class Buffer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.numbers: list[int] = []

    def __call__(self, record: RequestRecord) -> None:
        self.records.append(record)

    def steps(self, steps: list[StepTrace]) -> None:
        self.numbers += [s.step for s in steps]

    def encoded(self, since: float) -> bytes:
        return json.dumps({"steps": self.numbers, "paths": [r.path for r in self.records]}).encode()

    def slow_requests(self) -> list[dict[str, Any]]:
        return [{"id": "r", "cause": "queue"}]


def app_of(engine: FakeEngine, buffer: Buffer | None, **config: Any) -> App:
    return create_app(engine, TOKENIZER, TEMPLATE, HttpConfig(**config), buffer=buffer)


def step(number: int) -> StepTrace:
    values: dict[str, Any] = dict.fromkeys(StepTrace.__struct_fields__, 0)
    return StepTrace(**{**values, "step": number, "stages": ()})


def test_a_trace_on_demand_has_what_happened_meanwhile() -> None:
    async def main() -> None:
        engine, buffer = FakeEngine(says("hello")), Buffer()
        app = app_of(engine, buffer, admin_key=("boss",))
        async with client(app) as http:
            await http.post("/v1/completions", json={"prompt": "before", "max_tokens": 1})
            asking = asyncio.ensure_future(http.post("/debug/trace?seconds=0.3", headers=ADMIN))
            while engine.traced is None:
                await asyncio.sleep(0.005)
            engine.traced([step(1), step(2)])
            await http.post("/v1/completions", json={"prompt": "during", "max_tokens": 3})
            answer = await asking
            assert engine.traced is None
            await http.post("/v1/completions", json={"prompt": "after", "max_tokens": 1})
        assert answer.status_code == 200
        assert answer.json() == {"steps": [1, 2], "paths": ["/v1/completions"]}
        (record,) = buffer.records[:1]
        assert record.completion_tokens == 3
        assert record.stages["tokenize"] > 0 and record.stages["detokenize"] > 0
        assert {"body", "socket"} <= set(record.stages)
        assert record.timings is not None and 0 <= record.late < 60
        assert sum(r.path == "/v1/completions" for r in buffer.records) == 1

    run(main)


def test_a_trace_does_not_end_one_that_runs() -> None:
    async def main() -> None:
        engine, buffer = FakeEngine(says("hello")), Buffer()
        app = app_of(engine, buffer, admin_key=("boss",))
        assert app.front.tracing is not None
        assert b'trace_recording{model_name="fake"} 0.0' in app.front.page.render()
        app.front.tracing.start()
        assert b'trace_recording{model_name="fake"} 1.0' in app.front.page.render()
        async with client(app) as http:
            assert (await http.post("/debug/trace?seconds=0.01", headers=ADMIN)).status_code == 200
        assert engine.traced is not None
        await app.front.tracing.stop()
        assert engine.traced is None
        assert b'trace_recording{model_name="fake"} 0.0' in app.front.page.render()

    run(main)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    ("config", "key", "status"),
    [
        ({"admin_key": ("boss",)}, None, 403),
        ({"admin_key": ("boss",), "api_key": ("user",)}, None, 401),
        ({"admin_key": ("boss",), "api_key": ("user",)}, "user", 403),
        ({"admin_key": ("boss",)}, "boss", 200),
    ],
)
def test_only_an_admin_may(method: str, path: str, config: Any, key: str | None, status: int) -> None:
    async def main() -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with client(app_of(FakeEngine(), Buffer(), **config)) as http:
            answer = await http.request(method, path, params={"seconds": "0.01"}, headers=headers)
        assert answer.status_code == status, answer.text

    run(main)


@pytest.mark.parametrize(("route", "status"), [(ROUTES[0], 403), (ROUTES[1], 200)])
def test_a_server_without_keys_shows_slow_requests_alone(route: tuple[str, str], status: int) -> None:
    async def main() -> None:
        async with client(app_of(FakeEngine(), Buffer())) as http:
            answer = await http.request(*route)
        assert answer.status_code == status, answer.text

    run(main)


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "inf", "five"])
def test_bad_seconds(seconds: str) -> None:
    async def main() -> None:
        async with client(app_of(FakeEngine(), Buffer(), admin_key=("boss",))) as http:
            answer = await http.post("/debug/trace", params={"seconds": seconds}, headers=ADMIN)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "seconds"

    run(main)


def test_a_server_without_a_buffer() -> None:
    async def main() -> None:
        async with client(app_of(FakeEngine(), None, admin_key=("boss",))) as http:
            answer = await http.post("/debug/trace", headers=ADMIN)
        assert answer.status_code == 404 and "no traces" in answer.text

    run(main)


def test_slow_requests_are_listed() -> None:
    async def main() -> None:
        async with client(app_of(FakeEngine(), Buffer(), admin_key=("boss",))) as http:
            answer = await http.get("/debug/slow", headers=ADMIN)
        assert answer.json() == {"requests": [{"id": "r", "cause": "queue"}]}

    run(main)
