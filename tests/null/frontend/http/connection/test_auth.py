from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import hash_blocks, root_hash
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import Call, client, make_app, run, spin
from tests.support.fake_engine import FakeEngine

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/models", "GET"),
        ("/metrics", "GET"),
        ("/ready/", "GET"),
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
def test_everything_but_probes_is_closed(path: str, method: str) -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            response = await http.request(method, path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "authentication_error"

    run(main)


def test_probes_need_no_key() -> None:
    """Kubernetes and load balancers have no key. The answer says only whether to send requests."""

    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/health?x=1")).status_code == 200
            assert (await http.get("/ready")).json() == {"status": "ready"}

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
        ("Bearer\tfirst-key", 401),
        ("Bearer first-key extra", 401),
        ("Token first-key", 401),
        ("", 401),
        ("Bearer " + "x" * 60_000, 401),
    ],
)
def test_keys_are_compared_whole(value: str, status: int) -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
            headers = {"authorization": value.encode("latin-1")}
            assert (await http.get("/v1/models", headers=headers)).status_code == status

    run(main)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "first-key")], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401),
        # Authorization of another scheme was meant for a proxy.
        ([("authorization", "Basic dTpw"), ("x-api-key", "first-key")], 200),
        ([("authorization", "Bearer wrong"), ("x-api-key", "first-key")], 401),
        ([("authorization", "Bearer wrong"), ("authorization", "Bearer first-key")], 401),
        ([("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")], 200),
    ],
)
def test_one_header_counts(headers: list[tuple[str, str]], status: int) -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=KEYS)) as http:
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
    "content",
    [
        b"one\r\ntwo\r\n",
        b"\xef\xbb\xbfone\n\n\ntwo",
        b"\xef\xbb\xbf# of the team\r\n one\r\n\r\n\ttwo \r\n\r\n",
    ],
)
def test_a_file_of_keys_may_come_from_any_editor(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    assert HttpConfig(api_key_file=str(path)).with_environment({}).api_key == ("one", "two")


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full"])
def test_a_file_of_keys_that_never_ends_is_a_fault(path: str) -> None:
    with pytest.raises(ConfigError, match="too large"):
        HttpConfig(api_key_file=path).with_environment({})


@pytest.mark.parametrize("mode", ["folder", "unreadable"])
def test_a_file_of_keys_that_cannot_be_read_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def refuse(*of: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    if mode == "unreadable":  # root can read every file
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match="cannot read the keys"):
        HttpConfig(api_key_file=str(tmp_path)).with_environment({})


def test_a_key_given_twice_is_one_key() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, api_key=("one", "one"), max_queued_requests=4, max_prompts=4)
        headers = {"authorization": "Bearer one"}
        calls = []
        for _ in range(4):  # a single key has the whole queue
            calls.append(Call(app, "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers))
            await spin()
        assert [call.status for call in calls] == [None] * 4
        engine.resume()
        for call in calls:
            await call.task

    run(main)


@pytest.mark.parametrize("digest", ["sha256:", "sha256:abc", "SHA256:" + "g" * 64, "sha256:" + "0" * 63])
def test_a_digest_that_is_none_is_a_fault_and_not_a_key(digest: str) -> None:
    for field in ("api_key", "admin_key"):
        with pytest.raises(ConfigError, match="64 hexadecimal digits") as e:
            HttpConfig(**{field: (digest,)})
        assert digest.partition(":")[2][:4] not in str(e.value) or len(digest) < 9


def test_an_admin_alone_ends_others_requests_and_nobody_without_keys_is_an_admin() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, admin_key=("admin",))
        call = Call(app, "/v1/completions", {"prompt": "x", "request_id": "r", "max_tokens": 9})
        await spin()
        for headers, status in (({"authorization": "Bearer wrong"}, 200), ({}, 404)):
            # Without keys there is one tenant: what it sent, anybody may end.
            end = Call(app, "/v1/abort", {"request_id": "r"}, headers=headers)
            await end.task
            assert end.status == status
            engine.resume()
            await call.task

    run(main)


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
                body = {"lora_name": "x"} | ({} if "unload" in path else {"lora_path": "x"})
                answer = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
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


def test_two_keys_may_choose_the_same_id() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, api_key=KEYS, admin_key=("admin",))
        calls = {}
        for key in KEYS:
            body = {"prompt": "x", "request_id": "r", "max_tokens": 9}
            calls[key] = Call(app, "/v1/completions", body, headers={"authorization": f"Bearer {key}"})
            await spin()
        assert len({request.id for request in engine.requests}) == 2
        for key in (KEYS[1], "admin"):  # each ends its own, and an admin what is left
            end = Call(app, "/v1/abort", {"request_id": "r"}, headers={"authorization": f"Bearer {key}"})
            await end.task
            assert end.status == 200
            engine.step()
            if key == KEYS[1]:
                await calls[KEYS[1]].task
                assert not calls[KEYS[0]].ended
        await calls[KEYS[0]].task
        assert all('"finish_reason":"abort"' in call.body.decode() for call in calls.values())

    run(main)
