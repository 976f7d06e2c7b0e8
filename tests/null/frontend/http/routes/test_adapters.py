"""LoRA adapters over HTTP: who may load them and from where, how requests name them, what answers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import ModelFileError
from pegainfer.contract.handle import DoneSink
from pegainfer.contract.request import hash_blocks, root_hash
from tests.support.asgi import client, make_app, run
from tests.support.fake_engine import INFO, FakeEngine

ADMIN = {"authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def engine() -> FakeEngine:
    return FakeEngine(info=msgspec.structs.replace(INFO, max_adapters=4))


def app_of(made: FakeEngine, root: Path, **config: Any) -> Any:
    return make_app(made, admin_key=("admin",), lora_root=str(root), **config)


def test_loaded_listed_used_and_unloaded(tmp_path: Path) -> None:
    made = engine()
    (tmp_path / "sql").mkdir()

    async def main() -> None:
        async with client(app_of(made, tmp_path), **ADMIN) as http:
            loaded = await http.post(LOAD, json={"lora_name": "sql-lora", "lora_path": "sql"})
            assert (loaded.status_code, loaded.json()) == (200, {"lora_name": "sql-lora", "loaded": True})
            assert [(a.name, a.path) for a in made.adapters()] == [("sql-lora", str(tmp_path / "sql"))]
            base, own = (await http.get("/v1/models")).json()["data"]
            assert (base["id"], base["root"]) == ("fake", "fake") and "parent" not in base
            assert (own["id"], own["root"], own["parent"]) == ("sql-lora", str(tmp_path / "sql"), "fake")
            assert (await http.get("/v1/models/sql-lora")).json() == own
            answer = await http.post(
                "/v1/completions", json={"model": "sql-lora", "prompt": "a", "max_tokens": 1}
            )
            assert answer.json()["model"] == "sql-lora"
            done = await http.post(UNLOAD, json={"lora_name": "sql-lora"})
            assert (done.status_code, made.adapters()) == (200, ())
            gone = await http.post("/v1/completions", json={"model": "sql-lora", "prompt": "a"})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
            again = await http.post(UNLOAD, json={"lora_name": "sql-lora"})
            assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")

    run(main)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x" * 40, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 1},
    "/v1/responses": {"input": "x" * 40, "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": 1},
    "/v1/embeddings": {"input": "x" * 40},
}


class WithAdapter(FakeEngine):
    """Has one adapter whose digest is known."""

    def adapters(self) -> tuple[AdapterInfo, ...]:
        return (AdapterInfo(name="tuned", path="/somewhere", digest=b"d" * 32),)


@pytest.mark.parametrize("path", BODIES)
def test_every_route_chooses_an_adapter_by_the_model(path: str) -> None:
    """The engine's request names it, and its block hashes start from its digest."""
    made = WithAdapter(info=msgspec.structs.replace(INFO, max_adapters=1))

    async def main() -> None:
        async with client(make_app(made)) as http:
            answers = [await http.post(path, json=BODIES[path] | {"model": m}) for m in ("tuned", "fake")]
            assert [a.status_code for a in answers] == [200, 200]
            assert [a.json()["model"] for a in answers] == ["tuned", "fake"]

    run(main)
    own, base = made.requests
    assert (own.adapter, own.adapter_digest) == ("tuned", b"d" * 32)
    assert (base.adapter, base.adapter_digest) == (None, b"")
    for request, digest in ((own, b"d" * 32), (base, None)):
        wanted = hash_blocks(request.prompt, INFO.block_size, parent=root_hash(digest, ""))
        assert request.block_hashes == b"".join(wanted) != b""


def refused(root: Path, body: dict[str, Any], path: str = LOAD, **config: Any) -> tuple[int, str]:
    made = engine()

    async def main() -> httpx.Response:
        async with client(app_of(made, root, **config), **ADMIN) as http:
            return await http.post(path, json=body)

    found: list[httpx.Response] = []

    async def keep() -> None:
        found.append(await main())

    run(keep)
    assert made.adapters() == ()
    return found[0].status_code, found[0].json()["error"]["message"]


@pytest.mark.parametrize("path", ["..", "../other", ".", "", "/etc", "link", "a/../../x", "a\0b"])
def test_folders_outside_of_the_root_are_refused(path: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "other").mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    status, message = refused(root, {"lora_name": "x", "lora_path": path})
    assert status == 400 and message.startswith("lora_path: expected a folder")


def test_names_and_fields_that_cannot_be_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for body, said in (
        ({"lora_name": "fake", "lora_path": "a"}, "another name than the model's"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x" * 257, "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a", "load_inplace": 1}, "load_inplace"),
    ):
        status, message = refused(tmp_path, body)
        assert status == 400 and said in message


def test_without_a_root_nothing_is_loaded() -> None:
    made = engine()

    async def main() -> None:
        async with client(make_app(made, admin_key=("admin",)), **ADMIN) as http:
            answer = await http.post(LOAD, json={"lora_name": "x", "lora_path": "a"})
            assert answer.status_code == 403 and "--lora-root" in answer.json()["error"]["message"]

    run(main)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_a_server_without_an_admin_key_changes_nothing(path: str, tmp_path: Path) -> None:
    made = engine()

    async def main() -> None:
        async with client(make_app(made, lora_root=str(tmp_path))) as http:
            body = {"lora_name": "x"} | ({"lora_path": "a"} if path == LOAD else {})
            answer = await http.post(path, json=body)
            assert answer.status_code == 403 and "--admin-key" in answer.json()["error"]["message"]

    run(main)


def test_what_the_engine_finds_wrong_is_the_callers_fault(tmp_path: Path) -> None:
    class Refusing(FakeEngine):
        def load_adapter(self, name: str, path: str, done: DoneSink, inplace: bool = False) -> None:
            done(ModelFileError("the adapter has no tensor x", where=path))

    made = Refusing(info=msgspec.structs.replace(INFO, max_adapters=1))
    (tmp_path / "a").mkdir()

    async def main() -> None:
        async with client(app_of(made, tmp_path), **ADMIN) as http:
            answer = await http.post(LOAD, json={"lora_name": "x", "lora_path": "a"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "lora_path")
            assert "the adapter has no tensor x" in error["message"]

    run(main)
