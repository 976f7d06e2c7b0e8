"""Several models in one server: routing, loading, unloading, and faults that stay with their own model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.answer.registry import Registry
from pegainfer.frontend.http.app import App, Shared, create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.fleet.fleet import Fleet
from pegainfer.frontend.http.fleet.fleet_app import FleetApp
from pegainfer.frontend.http.fleet.fleet_member import FleetConfig, Member, State
from pegainfer.frontend.http.front import Front, new_store
from tests.support.asgi import TEMPLATE, TOKENIZER, Call, run, spin
from tests.support.fake_engine import FakeEngine, says

MIB = 1 << 20


class Model:
    """A made-up model: its engine says its name. `gate` holds its loads back."""

    def __init__(self, name: str, rig: Rig, nbytes: int) -> None:
        self.name = name
        self.rig = rig
        self.nbytes = nbytes
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.engine: FakeEngine | None = None
        self.app: App | None = None
        self.dead: asyncio.Future[str] | None = None
        self.closed = 0

    async def load(self, member: Member) -> Model:
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        self.engine = FakeEngine(says(self.name))
        self.dead = asyncio.get_running_loop().create_future()
        self.app = create_app(
            self.engine, TOKENIZER, TEMPLATE, self.rig.http, names=(self.name,),
            shared=Shared(self.rig.fleet.registry, member.metrics, self.rig.store),
        )  # fmt: skip
        return self

    @property
    def front(self) -> Front:
        assert self.app is not None
        return self.app.front

    @property
    def routes(self) -> ASGIApp:
        assert self.app is not None
        return self.app.routes

    async def ended(self) -> str:
        assert self.dead is not None
        return await self.dead

    async def close(self) -> None:
        self.closed += 1

    def die(self) -> None:
        assert self.engine is not None and self.dead is not None
        self.engine.die()
        self.dead.set_result("signal 9")


class Rig:
    """A fleet of made-up models a, b and c of 100 MiB each. Make it within a running loop."""

    def __init__(self, http: dict[str, Any] | None = None, **config: Any) -> None:
        self.http = HttpConfig(**(http or {}))
        self.store = new_store(self.http)
        self.models = {name: Model(name, self, 100 * MIB) for name in "abc"}
        members = [Member(m.name, plan=lambda m=m: m.nbytes, load=m.load) for m in self.models.values()]
        self.fleet = Fleet(members, FleetConfig(**{"memory": 250 * MIB, **config}), Registry())
        self.app = FleetApp(self.fleet, self.http)
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def state(self, name: str) -> State:
        return self.fleet.members[name].state

    async def complete(self, model: str | None, **fields: Any) -> httpx.Response:
        body = {"prompt": "x", "max_tokens": 1, **({} if model is None else {"model": model}), **fields}
        return await self.client.post("/v1/completions", content=json.dumps(body))

    async def says(self, model: str | None) -> str:
        answer = await self.complete(model)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["model"] == body["choices"][0]["text"]
        return str(body["model"])


def fleet_test(
    main: Callable[[Rig], Awaitable[None]], http: dict[str, Any] | None = None, **config: Any
) -> None:
    async def whole() -> None:
        rig = Rig(http, **config)
        try:
            await main(rig)
        finally:
            await rig.fleet.close()

    run(whole)


def test_a_request_is_answered_by_the_model_that_it_names() -> None:
    async def main(rig: Rig) -> None:
        assert [await rig.says(name) for name in ("b", "a", "b", None)] == ["b", "a", "b", "a"]
        answer = await rig.complete("d")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "a, b, c" in answer.json()["error"]["message"]
        assert rig.fleet.members["b"].loads == 1  # once for both

    fleet_test(main)


def test_models_are_listed_loaded_or_not() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("b")
        listed = (await rig.client.get("/v1/models")).json()
        assert [(m["id"], m["object"], m["state"], m["loaded"]) for m in listed["data"]] == [
            ("a", "model", "unloaded", False),
            ("b", "model", "loaded", True),
            ("c", "model", "unloaded", False),
        ]
        one = (await rig.client.get("/v1/models/b")).json()
        assert (one["max_model_len"], one["memory_bytes"]) == (256, 100 * MIB)
        assert (await rig.client.get("/v1/models/d")).status_code == 404

    fleet_test(main)


def test_the_model_used_longest_ago_makes_room() -> None:
    async def main(rig: Rig) -> None:
        for name in ("a", "b", "a", "c"):  # 250 MiB hold two
            await rig.says(name)
        assert [rig.state(n) for n in "abc"] == [State.LOADED, State.UNLOADED, State.LOADED]
        assert rig.models["b"].closed == 1

    fleet_test(main)


def test_no_more_models_than_allowed_are_loaded() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        await rig.says("b")
        assert [rig.state(n) for n in "ab"] == [State.UNLOADED, State.LOADED]

    fleet_test(main, max_loaded=1)


def test_a_busy_model_finishes_before_it_makes_room() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        engine = rig.models["a"].engine
        assert engine is not None
        engine.paused = True
        running = asyncio.ensure_future(rig.complete("a", max_tokens=3))
        await spin()
        wanting = asyncio.ensure_future(rig.says("b"))
        while rig.state("a") is not State.UNLOADING:
            await asyncio.sleep(0.01)
        behind = asyncio.ensure_future(rig.says("a"))  # waits until it is loaded again
        await asyncio.sleep(0.1)
        assert not running.done() and not wanting.done() and rig.models["a"].closed == 0
        engine.resume()
        assert (await running).json()["choices"][0]["text"] == "a.."
        assert await wanting == "b"
        assert await behind == "a"

    fleet_test(main, max_loaded=1)


def test_many_that_want_different_models_are_all_answered() -> None:
    """With room for one model alone: each load serves those that waited for it before the next one."""

    async def main(rig: Rig) -> None:
        names = [*"abcabcabcaabbcc"]
        assert await asyncio.gather(*(rig.says(name) for name in names)) == names
        assert sum(m.loads for m in rig.fleet.members.values()) == 3

    fleet_test(main, max_loaded=1)


def test_an_idle_model_is_unloaded_and_loaded_again() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        reaping = asyncio.ensure_future(rig.fleet.reap())
        while rig.state("a") is not State.UNLOADED:
            await asyncio.sleep(0.01)
        reaping.cancel()
        assert await rig.says("a") == "a"
        assert rig.fleet.members["a"].loads == 2

    fleet_test(main, keep_alive=0.05)


def test_a_model_is_never_unloaded_where_that_was_asked_for() -> None:
    async def main(rig: Rig) -> None:
        await asyncio.wait_for(rig.fleet.reap(), 5)  # there is nothing to do for it

    fleet_test(main, keep_alive=-1.0)


def test_a_request_may_be_refused_while_its_model_is_loaded() -> None:
    async def main(rig: Rig) -> None:
        answer = await rig.complete("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        assert answer.headers["retry-after"] == "2"
        while rig.state("a") is not State.LOADED:
            await asyncio.sleep(0.01)
        assert await rig.says("a") == "a"
        assert rig.fleet.members["a"].loads == 1

    fleet_test(main, when_unloaded="refuse")


def test_no_more_requests_wait_than_may() -> None:
    async def main(rig: Rig) -> None:
        rig.models["a"].gate.clear()
        waiting = [asyncio.ensure_future(rig.says("a")) for _ in range(2)]
        await spin()
        answer = await rig.complete("a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        rig.models["a"].gate.set()
        assert await asyncio.gather(*waiting) == ["a", "a"]

    fleet_test(main, max_waiting=2)


def test_a_model_that_cannot_be_loaded_harms_no_other() -> None:
    async def main(rig: Rig) -> None:
        rig.models["a"].fault = ConfigError("no such file", where="/secret/place")
        broken, other = await asyncio.gather(rig.complete("a"), rig.says("b"))
        assert other == "b"
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "model_failed")
        assert "secret" not in broken.text and broken.headers["retry-after"] == "10"
        rig.models["a"].fault = None
        assert (await rig.complete("a")).status_code == 503  # not tried again at once
        rig.fleet.members["a"].failed_at -= 11
        assert await rig.says("a") == "a"
        rig.models["c"].nbytes = 300 * MIB  # more than all may have
        assert (await rig.complete("c")).json()["error"]["code"] == "model_failed"
        assert await rig.says("b") == "b" and rig.fleet.members["b"].loads == 1

    fleet_test(main)


def test_an_unexpected_fault_of_a_load_is_no_others() -> None:
    async def main(rig: Rig) -> None:
        rig.models["a"].fault = ZeroDivisionError("a bug")
        broken = await rig.complete("a")
        assert broken.status_code == 503 and "bug" not in broken.text
        assert await rig.says("b") == "b"

    fleet_test(main)


def test_an_engine_that_dies_harms_no_other_and_is_loaded_again() -> None:
    async def main(rig: Rig) -> None:
        for name in "ab":
            await rig.says(name)
            engine = rig.models[name].engine
            assert engine is not None
            engine.paused = True
        dying = asyncio.ensure_future(rig.complete("a"))
        living = asyncio.ensure_future(rig.complete("b"))
        await spin()
        rig.models["a"].die()
        answer = await dying
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        while rig.state("a") is not State.UNLOADED:
            await asyncio.sleep(0.01)
        assert rig.models["a"].closed == 1
        assert await rig.says("a") == "a"
        other = rig.models["b"].engine
        assert other is not None and not living.done()
        other.resume()
        assert (await living).json()["choices"][0]["text"] == "b"

    fleet_test(main)


def test_an_engine_that_dies_during_another_load_takes_no_more_requests() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        rig.models["b"].gate.clear()
        loading = asyncio.ensure_future(rig.says("b"))
        while rig.state("b") is not State.LOADING:
            await asyncio.sleep(0.01)
        rig.models["a"].die()
        await spin()
        behind = asyncio.ensure_future(rig.says("a"))  # is not given to the dead engine
        await asyncio.sleep(0.05)
        assert not behind.done()
        rig.models["b"].gate.set()
        assert (await loading, await behind) == ("b", "a")

    fleet_test(main)


def test_an_engine_that_does_not_end_in_order_holds_up_nobody() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")

        async def close() -> None:
            raise OSError("no such process")

        rig.models["a"].close = close  # type: ignore[method-assign]
        assert await rig.says("b") == "b"
        assert rig.state("a") is State.UNLOADED
        del rig.models["a"].close  # type: ignore[method-assign]
        assert await rig.says("a") == "a"

    fleet_test(main, max_loaded=1)


def test_a_client_that_leaves_while_its_model_is_loaded() -> None:
    async def main(rig: Rig) -> None:
        rig.models["a"].gate.clear()
        call = Call(rig.app, "/v1/completions", {"model": "a", "prompt": "x"})  # type: ignore[arg-type]
        await spin()
        assert not call.task.done()
        call.disconnect()
        await asyncio.wait_for(call.task, 5)
        assert call.status is None
        rig.models["a"].gate.set()
        while rig.state("a") is not State.LOADED:  # the load goes on for the next one
            await asyncio.sleep(0.01)
        assert rig.fleet.members["a"].users == 0 and not rig.fleet.members["a"].waiting
        await rig.fleet.unload(rig.fleet.members["a"])  # nobody holds it

    fleet_test(main)


def test_faulty_bodies_get_the_answers_of_a_single_model() -> None:
    async def main(rig: Rig) -> None:
        for content, status in ((b"{", 400), (b'{"model": 3, "prompt": "x"}', 400), (b"x" * 2000, 413)):
            answer = await rig.client.post("/v1/completions", content=content)
            assert answer.status_code == status, answer.text
        assert (await rig.client.post("/v1/nowhere", content=b"{}")).json()["error"]["code"] == "no_route"
        assert (await rig.client.get("/v1/completions")).status_code == 405
        assert (await rig.client.post("/debug/trace")).json()["error"]["code"] == "unsupported"

    fleet_test(main, {"max_body_bytes": 1000})


def test_stored_responses_survive_the_unloading_of_their_model() -> None:
    async def main(rig: Rig) -> None:
        body = {"model": "a", "input": "x", "store": True, "max_output_tokens": 16}
        made = (await rig.client.post("/v1/responses", content=json.dumps(body))).json()
        await rig.fleet.unload(rig.fleet.members["a"])
        await rig.says("b")
        assert (await rig.client.get(f"/v1/responses/{made['id']}")).json()["model"] == "a"
        assert rig.state("a") is State.UNLOADED  # nothing is loaded for what any model can tell
        again = {"model": "b", "input": "y", "previous_response_id": made["id"], "max_output_tokens": 16}
        assert (await rig.client.post("/v1/responses", content=json.dumps(again))).status_code == 200
        assert (await rig.client.get(f"/v1/responses/{made['id']}")).json()["model"] == "a"

    fleet_test(main)


def test_metrics_by_model() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        await rig.says("b")
        lines = (await rig.client.get("/metrics")).text.splitlines()
        heads = [line.split()[2] for line in lines if line.startswith("# TYPE")]
        assert len(heads) == len(set(heads))
        assert sum(line.startswith("pegainfer:resident_memory_bytes") for line in lines) == 1
        for wanted in (
            'pegainfer:request_success_total{finished_reason="length",model_name="a"} 1.0',
            'pegainfer:request_success_total{finished_reason="length",model_name="b"} 1.0',
            'pegainfer:model_loaded{model_name="c"} 0.0',
            'pegainfer:model_loads_total{model_name="b"} 1.0',
        ):
            assert wanted in lines
        await rig.fleet.unload(rig.fleet.members["a"])
        await rig.says("a")  # its counters went on
        text = (await rig.client.get("/metrics")).text
        assert 'request_success_total{finished_reason="length",model_name="a"} 2.0' in text
        assert (await rig.client.get("/load")).json()["loaded_models"] == 2

    fleet_test(main)


def test_models_are_loaded_and_unloaded_by_admins() -> None:
    async def main(rig: Rig) -> None:
        async def ask(what: str, key: str, model: str = "a") -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await rig.client.post(f"/admin/models/{what}", json={"model": model}, headers=headers)

        for what in ("load", "unload"):
            assert (await ask(what, "user")).status_code == 403
            assert (await ask(what, "other")).status_code == 401
        loaded = (await ask("load", "admin")).json()
        assert (loaded["model"], loaded["loaded"]) == ("a", True)
        assert rig.state("a") is State.LOADED
        assert (await ask("unload", "admin")).json() == {"model": "a", "loaded": False}
        assert rig.state("a") is State.UNLOADED
        assert (await ask("unload", "admin")).status_code == 200  # again does nothing
        assert (await ask("load", "admin", "d")).status_code == 404
        rig.models["b"].fault = ConfigError("broken")
        assert (await ask("load", "admin", "b")).json()["error"]["code"] == "model_failed"

    fleet_test(main, {"api_key": ("user",), "admin_key": ("admin",)})


def test_without_an_admin_key_nobody_is_an_admin() -> None:
    async def main(rig: Rig) -> None:
        answer = await rig.client.post("/admin/models/load", json={"model": "a"})
        assert answer.status_code == 403 and "--admin-key" in answer.text

    fleet_test(main)


def test_a_request_of_any_model_is_aborted() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("b")
        engine = rig.models["b"].engine
        assert engine is not None
        engine.paused = True
        running = asyncio.ensure_future(rig.complete("b", request_id="mine"))
        await spin()
        assert (await rig.client.post("/v1/abort", json={"request_id": "mine"})).json()["aborted"] is True
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        assert (await rig.client.post("/v1/abort", json={"request_id": "mine"})).status_code == 404

    fleet_test(main)


def test_a_server_that_ends_takes_no_more_requests() -> None:
    async def main(rig: Rig) -> None:
        await rig.says("a")
        rig.app.drain()
        await asyncio.wait_for(rig.app.idle(), 5)
        for name in "ab":
            answer = await rig.complete(name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert (await rig.client.get("/ready")).status_code == 503
        assert (await rig.client.get("/health")).status_code == 200

    fleet_test(main)


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/", "/dashboard", "/tokenizer_info"])
def test_pages_are_those_of_the_first_model(path: str) -> None:
    async def main(rig: Rig) -> None:
        assert (await rig.client.get(path)).status_code == 200
        assert rig.state("a") is State.LOADED

    fleet_test(main)
