"""Responses that are kept: read again, gone on with, listed, made in the background, forgotten."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.http.app import App
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses_api.begin import begun
from pegainfer.frontend.http.responses_api.request import ResponsesRequest
from pegainfer.frontend.http.responses_api.response import Response
from pegainfer.frontend.http.responses_api.store import ResponseStore, Stored
from tests.support.asgi import Call, run, spin
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import app_of, ask_app, prompt_of, scripted

PATH = "/v1/responses"


def get(app: App, path: str, **headers: str) -> dict[str, Any]:
    response = ask_app(app, path, **headers)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_response_is_read_again_and_forgotten() -> None:
    app = app_of(scripted("hello"))
    made = ask_app(app, PATH, {"input": "hi"}).json()
    path = f"{PATH}/{made['id']}"
    assert get(app, path) == made
    assert get(app, path + "?include[]=reasoning.encrypted_content&stream=false") == made
    for query in ("?stream=true", "?include=x", "?colour=red"):
        assert ask_app(app, path + query).status_code == 400
    assert ask_app(app, path, method="DELETE").json() == {
        "id": made["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    assert ask_app(app, path).status_code == 404
    assert ask_app(app, path, method="DELETE").status_code == 404


def test_a_stream_is_kept_too_and_nothing_is_where_none_is_wanted() -> None:
    app = app_of(scripted("hello"))
    ask_app(app, PATH, {"input": "hi", "stream": True, "request_id": "a"})
    assert get(app, f"{PATH}/resp_a")["output"][0]["content"][0]["text"] == "hello"
    ask_app(app, PATH, {"input": "hi", "store": False, "request_id": "b"})
    ask_app(app, PATH, {"input": "hi", "temperature": -1, "request_id": "c"})
    assert len(app.front.responses) == 1
    again = ask_app(app, PATH, {"input": "hi", "request_id": "a"})
    assert again.status_code == 400 and again.json()["error"]["param"] == "request_id"


def test_a_conversation_goes_on() -> None:
    engine = scripted("one")
    app = app_of(engine)
    first = ask_app(app, PATH, {"input": "hi", "instructions": "A"}).json()
    body = {"input": "more", "previous_response_id": first["id"]}
    second = ask_app(app, PATH, body).json()
    assert second["previous_response_id"] == first["id"]
    # Instructions belong to one response alone.
    assert prompt_of(engine) == "user:hi\nassistant:one\nuser:more\n"
    # What is forgotten takes nothing from those that follow it.
    ask_app(app, f"{PATH}/{first['id']}", method="DELETE")
    ask_app(app, PATH, {"input": [], "previous_response_id": second["id"], "instructions": "B"})
    assert prompt_of(engine) == "system:B\nuser:hi\nassistant:one\nuser:more\nassistant:one\n"


def test_the_input_is_listed_in_pages() -> None:
    app = app_of(scripted("one"))
    first = ask_app(
        app, PATH, {"input": [{"role": "user", "content": str(i), "id": f"m{i}"} for i in range(3)]}
    )
    second = ask_app(app, PATH, {"input": "more", "previous_response_id": first.json()["id"]}).json()
    path = f"{PATH}/{second['id']}/input_items"
    listed = get(app, path)
    assert [i["content"][0]["text"] for i in listed["data"]] == ["more", "one", "2", "1", "0"]
    assert listed["object"] == "list" and listed["has_more"] is False
    page = get(app, path + "?order=asc&limit=2&after=m0")
    assert [i["content"][0]["text"] for i in page["data"]] == ["1", "2"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("m1", "m2", True)
    for query in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=zzz", "?before=m0"):
        assert ask_app(app, path + query).status_code == 400


def test_each_key_has_its_own() -> None:
    app = app_of(scripted("x"), api_key=("k1", "k2"))
    id = ask_app(app, PATH, {"input": "hi"}, authorization="Bearer k1").json()["id"]
    assert get(app, f"{PATH}/{id}", authorization="Bearer k1")["id"] == id
    for suffix, method in (("", "GET"), ("", "DELETE"), ("/cancel", "POST"), ("/input_items", "GET")):
        other = ask_app(app, f"{PATH}/{id}{suffix}", method=method, authorization="Bearer k2")
        assert other.status_code == 404
    body = {"input": "hi", "previous_response_id": id}
    assert ask_app(app, PATH, body, authorization="Bearer k2").status_code == 404


def test_a_response_in_the_background() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)

        async def fetch(
            path: str, method: str = "GET", body: Any = None
        ) -> tuple[int | None, dict[str, Any]]:
            call = Call(app, path, body, method=method)
            await call.task
            return call.status, json.loads(call.body)

        status, begun = await fetch(PATH, "POST", {"input": "hi", "background": True, "request_id": "a"})
        assert (status, begun["status"], begun["output"]) == (200, "in_progress", [])
        path = f"{PATH}/resp_a"
        assert (await fetch(path))[1]["status"] == "in_progress"
        unended = {"input": "x", "previous_response_id": "resp_a"}
        assert (await fetch(PATH, "POST", unended))[0] == 400
        engine.resume()
        await app.idle()
        await spin()
        done = (await fetch(path))[1]
        assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "hello")
        assert (await fetch(path + "/cancel", "POST"))[0] == 400

        engine.paused = True
        await fetch(PATH, "POST", {"input": "hi", "background": True, "request_id": "b"})
        await spin()
        engine.step()
        status, cancelled = await fetch(f"{PATH}/resp_b/cancel", "POST")
        assert (status, cancelled["status"]) == (200, "cancelled")
        await app.idle()
        await spin()
        assert (await fetch(f"{PATH}/resp_b/cancel", "POST"))[1]["output"][0]["content"][0]["text"] == "h"

        await fetch(PATH, "POST", {"input": "hi", "background": True, "request_id": "c"})
        await spin()
        engine.die()
        await app.idle()
        await spin()
        failed = (await fetch(f"{PATH}/resp_c"))[1]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"

    run(main)


def test_only_the_background_is_cancelled() -> None:
    app = app_of(scripted("x"))
    id = ask_app(app, PATH, {"input": "hi"}).json()["id"]
    assert ask_app(app, f"{PATH}/{id}/cancel", method="POST").status_code == 400


def test_a_client_that_leaves_leaves_nothing() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        call = Call(app, PATH, {"input": "hi", "stream": True})
        await spin()
        engine.step()
        await call.until(lambda: bool(call.body))
        assert len(app.front.responses) == 1
        call.disconnect()
        await call.task
        assert len(app.front.responses) == 0 and app.num_live == 0

    run(main)


# ---------------------------------------------------------------------- the store itself


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id: str) -> Response:
    front = app_of(FakeEngine()).front
    return begun(front, ResponsesRequest(input="x"), id)


def ids(store: ResponseStore, among: str, owner: bytes | None = None) -> str:
    found = ""
    for id in among:
        try:
            store.get(id, owner)
            found += id
        except ApiError:
            continue
    return found


def put(store: ResponseStore, id: str, size: int = 0, owner: bytes | None = None) -> Stored:
    out: list[Stored] = []

    async def main() -> None:
        out.append(store.put(response(id), [], [], owner, size))

    run(main)
    return out[0]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_one_used_longest_ago_goes_first(clock: Clock) -> None:
    store = ResponseStore(most=2, most_bytes=1 << 20, seconds=10, clock=clock)
    put(store, "a")
    put(store, "b")
    store.get("a", None)
    put(store, "c")
    assert ids(store, "abc") == "ac"


def test_the_size_is_bounded(clock: Clock) -> None:
    store = ResponseStore(most=10, most_bytes=1000, seconds=10, clock=clock)
    for id in "abc":
        put(store, id, 400)
    assert ids(store, "abc") == "bc"
    put(store, "d", 2000)  # the newest stays, however large
    assert ids(store, "abcd") == "d"


def test_the_age_is_bounded(clock: Clock) -> None:
    store = ResponseStore(most=10, most_bytes=1 << 20, seconds=10, clock=clock)
    put(store, "a")
    clock.now = 9.9
    put(store, "b")
    assert ids(store, "ab") == "ab"
    clock.now = 10.0
    assert ids(store, "ab") == "b"
    put(store, "a")
    with pytest.raises(RequestError):
        put(store, "a")


def test_what_runs_is_never_too_old(clock: Clock) -> None:
    store = ResponseStore(most=10, most_bytes=1 << 20, seconds=10, clock=clock)
    entry = put(store, "a")
    entry.generation = object()  # type: ignore[assignment]
    put(store, "b")
    clock.now = 10.0
    assert ids(store, "ab") == "a"
    entry.generation = None
    clock.now = 19.9
    assert ids(store, "a") == "a"
    clock.now = 20.0
    assert ids(store, "a") == ""


@pytest.mark.parametrize("bound", [{"most": 4, "most_bytes": 1 << 20}, {"most": 99, "most_bytes": 500}])
def test_one_key_cannot_push_out_what_another_keeps(clock: Clock, bound: dict[str, int]) -> None:
    store = ResponseStore(seconds=10, clock=clock, **bound)
    put(store, "m", 100, b"mine")
    put(store, "n", 100, b"mine")
    for id in "abcdefgh":
        put(store, id, 100, b"flood")
    assert ids(store, "mn", b"mine") == "mn"
    assert ids(store, "abcdefgh", b"flood")[-2:] == "gh"
    assert ids(store, "mn", b"flood") == ids(store, "abcdefgh", b"mine") == ""
    put(store, "m", 100, b"flood")  # ids are a key's own as well
    for id in "mnabcdefgh":
        for owner in (b"mine", b"flood"):
            with contextlib.suppress(ApiError):
                store.drop(store.get(id, owner))
    assert len(store) == 0 and not store._shelves and store._bytes == 0


# ---------------------------------------------------------------------- conversations


def test_a_conversation_is_no_longer_than_a_body_may_be() -> None:
    app = app_of(scripted("one"), max_body_bytes=3000)
    id = None
    for _ in range(3):
        body = {"input": "x" * 800, "previous_response_id": id}
        answer = ask_app(app, PATH, body)
        assert answer.status_code == 200, answer.text
        id = answer.json()["id"]
    body = {"input": "x" * 800, "previous_response_id": id, "truncation": "auto"}
    error = ask_app(app, PATH, body).json()["error"]
    assert error["param"] == "previous_response_id" and "≤ 3000 bytes" in error["message"]


def test_a_long_conversation_is_rendered_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(scripted("one"))
    sizes: list[int] = []
    work = app.front.text_work

    def noting(size: int, do: Any, stage: str = "tokenize") -> Any:
        sizes.append(size)
        return work(size, do, stage)

    monkeypatch.setattr(app.front, "text_work", noting)
    first = ask_app(app, PATH, {"input": "x" * 5000}).json()
    sizes.clear()
    ask_app(app, PATH, {"input": "y", "previous_response_id": first["id"]})
    # The input itself is short; all that deals with the whole conversation knows its length.
    assert [size for size in sizes if size < 5000] == sizes[:1] + sizes[-1:]


def test_a_name_in_a_path_holds_nothing_that_ends_it() -> None:
    for id in ("a/b", "a?b", "a#b", "a%2fb"):
        error = ask_app(app_of(scripted("x")), PATH, {"input": "hi", "request_id": id}).json()["error"]
        assert error["param"] == "request_id"


@pytest.mark.parametrize("ends", ["stop", "length", "error"])
def test_what_was_cancelled_stays_so(ends: str) -> None:
    """Its last token was on the way already when the client was told."""
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        body = {"input": "hi", "background": True, "request_id": "a", "max_output_tokens": 2}
        await Call(app, PATH, body if ends == "length" else {**body, "max_output_tokens": 9}).task
        await spin()
        engine.cancel = lambda *of: None  # type: ignore[method-assign]  # it comes too late
        cancelled = Call(app, f"{PATH}/resp_a/cancel")
        await cancelled.task
        assert json.loads(cancelled.body)["status"] == "cancelled"
        if ends == "error":
            engine.die()
        else:
            engine.resume()
        await app.idle()
        await spin()
        call = Call(app, f"{PATH}/resp_a", method="GET")
        await call.task
        body = json.loads(call.body)
        assert body["status"] == "cancelled"
        assert body["incomplete_details"] is body["error"] is body["completed_at"] is None

    run(main)


def test_a_running_response_that_is_forgotten_is_ended() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        await Call(app, PATH, {"input": "hi", "background": True, "request_id": "a"}).task
        await spin()
        await Call(app, f"{PATH}/resp_a", method="DELETE").task
        engine.step()
        await app.idle()
        assert app.num_live == 0 and len(app.front.responses) == 0

    run(main)


def test_a_chain_is_as_long_as_its_conversation_and_never_a_ring() -> None:
    engine = scripted("r")
    app = app_of(engine)
    for i in range(100):
        body = {"input": f"q{i}", "request_id": f"n{i}"}
        if i:
            body["previous_response_id"] = f"resp_n{i - 1}"
        assert ask_app(app, PATH, body).status_code == 200
        if i:  # what is forgotten takes nothing from what follows it
            assert ask_app(app, f"{PATH}/resp_n{i - 1}", method="DELETE").status_code == 200
    assert prompt_of(engine).split("assistant:r\n") == [f"user:q{i}\n" for i in range(100)]
    ring = {"input": "x", "request_id": "n99", "previous_response_id": "resp_n99"}
    assert ask_app(app, PATH, ring).json()["error"]["param"] == "request_id"
    itself = {"input": "x", "request_id": "new", "previous_response_id": "resp_new"}
    assert ask_app(app, PATH, itself).status_code == 404
    assert len(app.front.responses) == 1
