from __future__ import annotations

import time

import msgspec
import pytest

from pegainfer import __version__
from pegainfer.contract.event import EngineStats
from tests.support.asgi import Call, ask, client, make_app, run, spin
from tests.support.fake_engine import FakeEngine


def test_health_follows_the_engines_life_alone() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, ready_seconds=0.001)
        async with client(app) as http:
            assert (await http.get("/health")).status_code == 200
            call = Call(app, "/v1/completions", {"prompt": "a"})
            await spin()
            stalled = time.monotonic() - 1000
            engine.set_stats(EngineStats(running=1, last_step=stalled))
            app.front.registry.busy_since = stalled
            # As in a prefill that takes for ever: the process lives, yet nothing moves.
            assert (await http.get("/health")).status_code == 200
            ready = await http.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["error"]["code"] == "stalled"
            engine.die()
            await call.task
            for path in ("/health", "/ready"):
                dead = await http.get(path)
                assert dead.status_code == 503
                assert dead.json()["error"]["code"] == "engine_dead"
            assert call.status == 503

    run(main)


def test_ready_while_idle_busy_and_moving() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, ready_seconds=1000.0)
        long_ago = time.monotonic() - 5000
        engine.set_stats(EngineStats(last_step=long_ago))
        async with client(app) as http:
            assert (await http.get("/ready")).status_code == 200  # idle: nothing to step for
            call = Call(app, "/v1/completions", {"prompt": "a", "max_tokens": 1})
            await spin()
            assert (await http.get("/ready")).status_code == 200  # busy only since now
            app.front.registry.busy_since = long_ago
            assert (await http.get("/ready")).status_code == 503
            engine.set_stats(EngineStats(last_step=time.monotonic()))
            assert (await http.get("/ready")).status_code == 200  # it moves
            engine.resume()
            await call.task

    run(main)


def test_a_full_queue_is_not_ready() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, max_queued_requests=1, max_prompts=1)
        async with client(app) as http:
            call = Call(app, "/v1/completions", {"prompt": "a", "max_tokens": 2})
            await spin()
            full = await http.get("/ready")
            assert (full.status_code, full.json()["error"]["code"]) == (503, "overloaded")
            engine.step()
            await spin()
            assert (await http.get("/ready")).status_code == 200
            engine.resume()
            await call.task

    run(main)


def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": "a", "max_tokens": 2})
        await spin()
        app.drain()
        assert engine.drained
        async with client(app) as http:
            refused = await http.post("/v1/completions", json={"prompt": "b"})
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            assert app.num_live == 1
            engine.resume()
            await app.idle()
            await call.task
            assert call.status == 200
            assert app.num_live == 0

    run(main)


def test_load_shows_what_is_there() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": ["abc", "de"], "max_tokens": 1})
        await spin()
        engine.set_stats(EngineStats(running=2, waiting=1, free_blocks=60, total_blocks=64))
        async with client(app) as http:
            assert (await http.get("/load")).json() == {
                "server_load": 1,
                "running": 2,
                "waiting": 1,
                "queued_requests": 2,
                "queued_tokens": 5,
                "free_blocks": 60,
                "total_blocks": 64,
            }
        engine.resume()
        await call.task

    run(main)


def test_version() -> None:
    assert ask(FakeEngine(), "/version").json() == {"version": __version__}


def test_models_by_all_their_names() -> None:
    engine = FakeEngine()
    listed = ask(engine, "/v1/models", served_model_name=("a", "org/b", "a")).json()
    assert listed["object"] == "list"
    assert [m["id"] for m in listed["data"]] == ["a", "org/b"]
    one = ask(engine, "/v1/models/org/b", served_model_name=("a", "org/b")).json()
    assert one == {**listed["data"][1], "created": one["created"]}
    assert (one["object"], one["root"], one["max_model_len"]) == ("model", "fake", 256)
    missing = ask(engine, "/v1/models/c", served_model_name=("a",))
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_the_first_name_answers_and_every_name_is_taken() -> None:
    for name in ("a", "b"):
        answer = ask(
            FakeEngine(), "/v1/completions", {"prompt": "x", "model": name}, served_model_name=("a", "b")
        ).json()
        assert answer["model"] == "a"
    assert ask(FakeEngine(), "/v1/models", names=("given",)).json()["data"][0]["id"] == "given"


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-"])
def test_abort_by_id(prefix: str) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        call = Call(app, "/v1/completions", {"prompt": "a", "request_id": "job", "max_tokens": 50})
        await spin()
        engine.step()
        async with client(app) as http:
            done = await http.post("/v1/abort", json={"request_id": prefix + "job"})
            assert done.json() == {"request_id": "job", "aborted": True}
            await call.task
            choice = msgspec.json.decode(call.body)["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("h", "abort")
            gone = await http.post("/v1/abort", json={"request_id": "job"})
            assert gone.status_code == 404

    run(main)


ABSENT = {
    "/no/such/route": 404,
    "/v1/completions/x/": 404,
    "/%2e%2e/etc": 404,
}


@pytest.mark.parametrize("path", ABSENT)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_served_says_why(path: str, method: str) -> None:
    response = ask(FakeEngine(), path, method=method)
    assert response.status_code == ABSENT[path]
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert len(error["message"]) > len(path) + 10


@pytest.mark.parametrize(
    ("path", "method", "allow"),
    [
        ("/v1/completions", "GET", "POST"),
        ("/v1/chat/completions", "DELETE", "POST"),
        ("/v1/completions", "OPTIONS", "POST"),
        ("/health", "POST", "GET"),
        ("/v1/models", "PUT", "GET"),
        ("/v1/models/fake", "DELETE", "GET"),
        ("/tokenize", "GET", "POST"),
    ],
)
def test_a_wrong_method_is_a_405(path: str, method: str, allow: str) -> None:
    response = ask(FakeEngine(), path, method=method)
    assert response.status_code == 405
    assert allow in response.headers["allow"]
    assert method in response.json()["error"]["message"]


def test_head_is_as_good_as_get() -> None:
    assert ask(FakeEngine(), "/health", method="HEAD").status_code == 200


def test_tokenize_and_back() -> None:
    engine = FakeEngine()
    tokens = ask(engine, "/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert tokens == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [104, 0xC3, 0xA9],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert ask(engine, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "hé"}
    assert ask(engine, "/detokenize", {"tokens": [97, 256]}).json() == {"prompt": "a<|im_start|>"}
    assert ask(engine, "/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_a_chat_is_tokenised_as_it_is_served() -> None:
    engine = FakeEngine()
    messages = [{"role": "user", "content": "hi"}]
    ask(engine, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    served = list(memoryview(engine.requests[0].prompt).cast("i"))
    assert ask(engine, "/tokenize", {"messages": messages}).json()["tokens"] == served
    text = ask(engine, "/apply_template", {"messages": messages}).json()["prompt"]
    assert ask(engine, "/tokenize", {"prompt": text}).json()["tokens"] == served


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 258]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**40]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/apply_template", {"messages": []}, "messages"),
        ("/apply_template", {}, "messages"),
        ("/v1/abort", {}, "request_id"),
    ],
)
def test_bad_text_requests_are_named(path: str, body: dict[str, object], param: str) -> None:
    response = ask(FakeEngine(), path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_text_routes_check_the_model() -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply_template", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        assert ask(FakeEngine(), path, {**body, "model": "other"}).status_code == 404
        assert ask(FakeEngine(), path, {**body, "model": "fake"}).status_code == 200
