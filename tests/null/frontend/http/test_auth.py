from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import hash_blocks, root_hash
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import client, make_app, run, spin
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


def test_keys_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the team\n\n  one \ntwo\n")
    given = HttpConfig(api_key=("flag",), api_key_file=str(path)).with_environment({})
    assert given.api_key == ("flag", "one", "two")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"# none\n\n", "no key"),
        (b"\xff\xfe", "no UTF-8"),
        (b"x" * (2 << 20), "too large"),
    ],
)
def test_a_file_without_keys_opens_nothing(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{said}.*--api-key-file"):
        HttpConfig(api_key_file=str(path)).with_environment({})


def test_a_key_may_be_given_as_its_digest() -> None:
    digest = "sha256:" + hashlib.sha256(b"first-key").hexdigest()

    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=(digest,))) as http:
            for key, status in (("first-key", 200), (digest, 401), (digest.removeprefix("sha256:"), 401)):
                headers = {"authorization": f"Bearer {key}"}
                assert (await http.get("/v1/models", headers=headers)).status_code == status, key

    run(main)


@pytest.mark.parametrize("keys", [KEYS, ()])
@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/v1/%6coad_lora_adapter", "/v1/unload_lora_adapter/"]
)
def test_what_changes_the_server_needs_an_admin_key(path: str, keys: tuple[str, ...]) -> None:
    async def main() -> None:
        app = make_app(FakeEngine(), api_key=keys, admin_key=("admin",))
        async with client(app) as http:
            status = {}
            for key in ("first-key", "admin", "wrong"):
                answer = await http.post(path, json={}, headers={"authorization": f"Bearer {key}"})
                status[key] = answer.status_code
            assert status == {"first-key": 403, "admin": 404, "wrong": 401 if keys else 403}
            models = await http.get("/v1/models", headers={"authorization": "Bearer admin"})
            assert models.status_code == 200

    run(main)


def test_a_request_is_ended_by_its_sender_or_an_admin() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, api_key=KEYS, admin_key=("admin",))

        async def post(key: str, path: str, body: dict[str, object]) -> int:
            async with client(app, authorization=f"Bearer {key}") as http:
                return (await http.post(path, json=body)).status_code

        answers = []
        for number, ender in enumerate(("first-key", "admin")):
            body = {"prompt": "x", "request_id": f"r{number}"}
            answers.append(asyncio.create_task(post("first-key", "/v1/completions", body)))
            await spin()
            ask = {"request_id": f"r{number}"}
            assert await post("second-key", "/v1/abort", ask) == 404
            assert await post(ender, "/v1/abort", ask) == 200
            engine.step()
        assert await asyncio.gather(*answers) == [200, 200]

    run(main)


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
