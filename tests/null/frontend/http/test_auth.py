from __future__ import annotations

import pytest

from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import client, make_app, run
from tests.support.fake_engine import FakeEngine

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/models", "GET"),
        ("/metrics", "GET"),
        ("/ready", "GET"),
        ("/load", "GET"),
        ("/v1/completions", "POST"),
        ("/no/such/route", "GET"),
        ("/health/", "GET"),
        ("//health", "GET"),
        ("/HEALTH", "GET"),
        ("/%68ealth", "GET"),
        ("/health/../metrics", "GET"),
        ("/", "GET"),
    ],
)
def test_everything_but_health_is_closed(path: str, method: str) -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            response = await http.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"

    run(main)


def test_health_is_open() -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/health?x=1")).status_code == 200

    run(main)


@pytest.mark.parametrize(
    ("value", "status"),
    [
        ("Bearer first-key", 200),
        ("Bearer second-key", 200),
        ("bearer second-key", 200),
        ("Bearer  first-key ", 200),
        ("Bearer first-ke", 401),
        ("Bearer first-keyy", 401),
        ("Bearer FIRST-KEY", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("first-key", 401),
        ("Basic first-key", 401),
        ("Bearer first-key,second-key", 401),
        ("Bearer \xff", 401),
    ],
)
def test_keys_are_compared_whole(value: str, status: int) -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            headers = {"authorization": value.encode("latin-1")}
            assert (await http.get("/v1/models", headers=headers)).status_code == status

    run(main)


def test_a_refused_request_leaves_no_trace_in_the_engine() -> None:
    engine = FakeEngine()

    async def main() -> None:
        async with client(make_app(engine, api_key=KEYS)) as http:
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 401
        assert not engine.requests

    run(main)


def test_a_key_may_come_from_the_environment() -> None:
    given = HttpConfig(api_key=("flag",)).with_environment({"PEGAINFER_API_KEY": "variable"})
    assert given.api_key == ("flag", "variable")
    assert HttpConfig().with_environment({"PEGAINFER_API_KEY": ""}).api_key == ()
    assert HttpConfig().with_environment({}).api_key == ()


def test_without_keys_everything_is_open() -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine())) as http:
            assert (await http.get("/v1/models")).status_code == 200

    run(main)
