from __future__ import annotations

import hashlib

import pytest

from pegainfer.contract.request import hash_blocks, root_hash
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


@pytest.mark.parametrize(
    ("per_key", "salts"),
    [(True, ["{tenant}:s", "{other}:s"]), (False, ["s", "s"])],
)
def test_a_key_is_a_tenant_with_cached_prefixes_of_its_own(per_key: bool, salts: list[str]) -> None:
    engine = FakeEngine()

    async def main() -> None:
        app = make_app(engine, api_key=KEYS, cache_salt_per_key=per_key)
        for key in KEYS:
            async with client(app, authorization=f"Bearer {key}") as http:
                body = {"prompt": "x", "max_tokens": 1, "cache_salt": "s"}
                assert (await http.post("/v1/completions", json=body)).status_code == 200

    run(main)
    first, second = engine.requests
    tenants = [hashlib.sha256(key.encode()).hexdigest()[:16] for key in KEYS]
    assert [first.tenant, second.tenant] == tenants
    names = {"tenant": tenants[0], "other": tenants[1]}
    assert [first.cache_salt, second.cache_salt] == [salt.format(**names) for salt in salts]
    root = root_hash(None, first.cache_salt)
    assert first.block_hashes == b"".join(hash_blocks(first.prompt, 16, parent=root))


def test_without_keys_there_is_one_tenant() -> None:
    engine = FakeEngine()

    async def main() -> None:
        async with client(make_app(engine), authorization="Bearer whatever") as http:
            await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})

    run(main)
    assert (engine.requests[0].tenant, engine.requests[0].cache_salt) == ("", "")
