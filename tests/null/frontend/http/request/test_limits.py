"""Every bound at its edge: the last good value is served, the next one is a 400 that names the field."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.answer.generation import ALTERNATIVE_BYTES, LOGPROB_BYTES
from pegainfer.frontend.http.api_docs.operations import OPERATIONS
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import Call, ask, make_app, run, spin
from tests.support.fake_engine import INFO, FakeEngine

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
INT32 = 2**31 - 1

# field, values that are good, values that are not
EDGES: list[tuple[str, list[Any], list[Any]]] = [
    ("n", [1, 4], [0, -1, 5, 10**30]),
    ("max_tokens", [1, INT32, -1], [0, -2, INT32 + 1, 10**30]),
    ("min_tokens", [0, 128], [-1, 129, 10**30]),
    ("temperature", [0, 1e-9, 2, 100], [-0.1, 100.1, 1e300, 10**30]),
    ("top_p", [1e-6, 1], [0, -0.1, 1.0001]),
    ("min_p", [0, 1], [-0.1, 1.1]),
    ("top_k", [-1, 0, 1, INT32], [-2, INT32 + 1, 10**30]),
    ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 10**30]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 100], [0, -1, 1e-320, 1e-38, 0.009, 100.1]),
    ("logprobs", [0, 3], [-1, 4]),
    ("prompt_logprobs", [0, 3], [-1, 4]),
    ("priority", [-INT32, INT32], [-INT32 - 1, INT32 + 1]),
    ("timeout", [0.001, 50], [0, -1, 50.5]),
    ("cache_salt", ["", "x" * 256], ["x" * 257]),
    ("user", ["", "x" * 512], ["x" * 513]),
    ("request_id", ["x", "x" * 128], ["", "x" * 129]),
    ("stop", [[], ["ab"] * 3, "a" * 9, ["ääää"]], ["", [""], ["a", "b", "c", "d"], "a" * 10, ["äääää"]]),
    ("stop_token_ids", [[], [0, 257], [1, 2, 3, 4, 5]], [[-1], [258], [99999999], [1, 2, 3, 4, 5, 6]]),
    ("allowed_token_ids", [[0, 257], list(range(258))], [[], [-1], [258], [0] * 259]),
    (
        "logit_bias",
        [{}, {"0": 100, "257": -100}, {str(i): 1 for i in range(5)}],
        [
            {"258": 1},
            {"99999999": 5},
            {"-1": 1},
            {"x": 1},
            {"": 1},
            {"1.5": 1},
            {"٣": 1},
            {"1": 100.5},
            {"1": 1, "01": 2},
            {"0" * 5000: 1},
            {str(i): 1 for i in range(6)},
        ],
    ),
    ("bad_words", [[], ["a"] * 5, ["x" * 9]], [[""], [" "], ["a"] * 6, ["x" * 10]]),
]
CONFIG: dict[str, Any] = {
    "max_n": 4,
    "max_logprobs": 3,
    "max_stop_strings": 3,
    "max_stop_bytes": 9,
    "max_logit_bias": 5,
    "max_timeout_seconds": 50.0,
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, good, _ in EDGES for v in good])
def test_the_last_good_value_is_served(field: str, value: Any) -> None:
    engine = FakeEngine()
    response = ask(engine, PATH, {"prompt": "hi", field: value}, **CONFIG)
    assert response.status_code == 200, response.text
    assert len(engine.requests) == 1


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, _, bad in EDGES for v in bad])
def test_the_next_one_is_refused_by_name(field: str, value: Any) -> None:
    engine = FakeEngine()
    response = ask(engine, PATH, {"prompt": "hi", field: value}, **CONFIG)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].split("[")[0] == field
    assert error["message"].startswith(error["param"] + ": ")
    assert len(response.content) < 2000
    assert not engine.requests


def test_prompts_in_one_request() -> None:
    assert ask(FakeEngine(), PATH, {"prompt": ["a"] * 4}, max_prompts=4).status_code == 200
    error = ask(FakeEngine(), PATH, {"prompt": ["a"] * 5}, max_prompts=4).json()["error"]
    assert error["param"] == "prompt"
    assert "≤ 4 prompts" in error["message"]
    # Token ids are one prompt, however many they are.
    assert ask(FakeEngine(), PATH, {"prompt": [1] * 50}, max_prompts=4).status_code == 200


def test_prompts_times_n_are_bounded() -> None:
    body = {"prompt": ["a"] * 4, "n": 2, "max_tokens": 1}
    assert ask(FakeEngine(), PATH, body, max_prompts=8, max_n=2).status_code == 200
    error = ask(FakeEngine(), PATH, body, max_prompts=7, max_n=7).json()["error"]
    assert error["param"] == "n"
    assert "≤ 7 continuations" in error["message"]


def counted_bodies(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Path, field and body of all that tokenise a text however long it is."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    return [
        ("/tokenize", "prompt", {"prompt": text}),
        ("/tokenize", "messages", chat),
        ("/v1/messages/count_tokens", "messages", chat),
        (PATH, "prompt", {"prompt": text, "truncate_prompt_tokens": 5}),
        (CHAT, "messages", {**chat, "truncate_prompt_tokens": 5}),
    ]


@pytest.mark.parametrize("case", range(len(counted_bodies(""))))
def test_texts_that_are_counted_or_truncated_are_bounded(case: int) -> None:
    """The bound is one of characters, a template's included, and never below what the context may hold."""
    path, field, body = counted_bodies("")[case]
    template = 0
    if field == "messages":
        template = len(ask(FakeEngine(), "/apply_template", {"messages": body["messages"]}).json()["prompt"])
    for limit, most in ((2000, 2000), (10, 4 * INFO.max_model_len)):
        for size, status in ((most, 200), (most + 1, 400)):
            engine = FakeEngine()
            body = counted_bodies("ä" * (size - template))[case][2]
            response = ask(engine, path, body, max_counted_chars=limit)
            assert response.status_code == status, response.text
        message = response.json()["error"]["message"]
        assert message.startswith(f"{field}: expected ≤ {most} characters, got {most + 1}; ")
        assert "--max-counted-chars" in message
        assert not engine.requests


def test_the_engines_own_bound_on_logprobs_holds() -> None:
    info = msgspec.structs.replace(INFO, max_logprobs=2)
    assert ask(FakeEngine(info=info), PATH, {"prompt": "a", "logprobs": 2}).status_code == 200
    assert ask(FakeEngine(info=info), PATH, {"prompt": "a", "logprobs": 3}).status_code == 400


def test_the_body_limit_is_exact_declared_or_not() -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    for size, status in ((100, 200), (101, 413)):
        engine = FakeEngine()
        response = ask(engine, PATH, body.ljust(size), max_body_bytes=100)
        assert response.status_code == status
        assert len(engine.requests) == (status == 200)
    assert response.headers["connection"] == "close"
    assert "≤ 100 bytes" in response.json()["error"]["message"]


def test_a_body_in_pieces_is_bounded_as_it_comes() -> None:
    from pegainfer.frontend.http.app import App

    async def send_pieces(app: App, pieces: int) -> int:
        left = [b'{"prompt": "a"}', *[b" " * 10] * pieces]
        status = 0

        async def receive() -> Any:
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)

        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "headers": []}
        await app(scope, receive, send)
        return status

    async def main() -> None:
        app = make_app(FakeEngine(), max_body_bytes=95)
        assert await send_pieces(app, 8) == 200
        assert await send_pieces(app, 9) == 413
        assert await send_pieces(app, 10_000) == 413

    run(main)


BODIES = [op.path for op in OPERATIONS if op.request is not None]


async def status_of(path: str, receive: Any, **config: Any) -> int:
    """Of one request whose body comes from `receive`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": []}
    await make_app(FakeEngine(), **config)(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_stops_is_given_up(path: str) -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        assert await status_of(path, never, body_seconds=0.01) == 408

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_trickles_in_is_given_up(path: str) -> None:
    async def trickle() -> Any:
        await asyncio.sleep(0.002)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def main() -> None:
        assert await status_of(path, trickle, body_seconds=0.02) == 408

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_the_body_limit_holds_on_every_route(path: str) -> None:
    response = ask(FakeEngine(), path, b" " * 101, max_body_bytes=100)
    assert response.status_code == 413 and response.headers["connection"] == "close"


@pytest.mark.parametrize("path", BODIES)
def test_all_bodies_together_are_bounded(path: str) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, max_body_bytes=100, max_held_bytes=150)
        first = Call(app, PATH, b'{"prompt": "a", "max_tokens": 1}'.ljust(100))
        await spin()
        assert len(engine.requests) == 1
        for size, status in ((51, 503), (50, None)):
            second = Call(app, path, b"{}".ljust(size))
            await second.task
            assert second.status == status or (status is None and second.status == 400)
            assert app.front.held.num_bytes == 100
            if status == 503:
                assert second.headers["retry-after"] == "1"
                assert b"too large together" in second.body
        engine.resume()
        await first.task
        assert first.status == 200 and app.front.held.num_bytes == 0

    run(main)


def test_the_queue_of_requests_is_bounded() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, max_queued_requests=3, max_prompts=3)
        first = Call(app, PATH, {"prompt": ["a", "b"], "max_tokens": 1})
        await spin()
        second = Call(app, PATH, {"prompt": ["c", "d"], "max_tokens": 1})
        await second.task
        assert second.status == 503
        assert second.headers["retry-after"] == "1"
        assert len(engine.requests) == 2  # all prompts of a request or none
        third = Call(app, PATH, {"prompt": "e", "max_tokens": 1})
        await spin()
        assert third.status is None
        engine.resume()
        await first.task
        await third.task
        assert (first.status, third.status) == (200, 200)
        assert app.front.gate.waiting_requests == app.front.gate.waiting_tokens == 0

    run(main)


def test_the_queue_of_tokens_is_bounded() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, max_queued_tokens=10)
        first = Call(app, PATH, {"prompt": "x" * 20, "max_tokens": 1})  # alone it is never too long
        await spin()
        second = Call(app, PATH, {"prompt": "y"})
        await second.task
        assert second.status == 503
        assert "waiting prompt tokens" in second.body.decode()
        engine.step()  # the first has its first token and waits no more
        await first.task
        third = Call(app, PATH, {"prompt": "z" * 10, "max_tokens": 1})
        await spin()
        engine.step()
        await third.task
        assert third.status == 200

    run(main)


@pytest.mark.parametrize(
    ("bound", "limit", "prompt"), [("max_queued_requests", 8, "x"), ("max_queued_tokens", 80, "x" * 10)]
)
def test_one_of_several_keys_leaves_places_to_the_others(bound: str, limit: int, prompt: str) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        limits: dict[str, Any] = {bound: limit}
        app = make_app(engine, api_key=("a", "b", "c"), max_prompts=1, **limits)
        calls: dict[str, list[Call]] = {"a": [], "b": [], "c": []}
        for key in "aaaaabbbbcccc":
            body = {"prompt": prompt, "max_tokens": 1}
            calls[key].append(Call(app, PATH, body, headers={"authorization": f"Bearer {key}"}))
            await spin()
        # Of 8 places: 4 go to the first key, half of what is left to the second, and so on.
        waiting = {key: [c for c in of if c.status is None] for key, of in calls.items()}
        assert {key: len(of) for key, of in waiting.items()} == {"a": 4, "b": 2, "c": 1}
        refused = calls["a"][4]
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert b"this key's share of the queue is full" in refused.body
        engine.resume()
        for call in (c for of in waiting.values() for c in of):
            await call.task
            assert call.status == 200
        assert app.front.gate.waiting_requests == app.front.gate.waiting_tokens == 0
        assert not app.front.gate._shares
        again = Call(app, PATH, {"prompt": prompt, "max_tokens": 1}, headers={"authorization": "Bearer a"})
        await again.task
        assert again.status == 200

    run(main)


def test_a_place_in_the_queue_is_given_back_by_the_first_token() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine, max_queued_requests=1, max_prompts=1)
        first = Call(app, PATH, {"prompt": "a", "max_tokens": 5})
        await spin()
        engine.step()
        await spin()
        second = Call(app, PATH, {"prompt": "b", "max_tokens": 5})
        await spin()
        assert len(engine.requests) == 2
        engine.resume()
        await first.task
        await second.task
        assert (first.status, second.status) == (200, 200)

    run(main)


def test_two_live_requests_cannot_share_an_id() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        first = Call(app, PATH, {"prompt": "a", "request_id": "same", "max_tokens": 1})
        await spin()
        second = Call(app, PATH, {"prompt": "b", "request_id": "same"})
        await second.task
        assert second.status == 400
        assert '"param":"request_id"' in second.body.decode()
        engine.resume()
        await first.task
        assert first.status == 200
        third = Call(app, PATH, {"prompt": "b", "request_id": "same", "max_tokens": 1})
        await third.task
        assert third.status == 200

    run(main)


def test_what_the_logprobs_of_an_answer_may_take_is_bounded() -> None:
    """By what the request could come to: it is not known before how many tokens it will have."""
    engine = FakeEngine()
    longest = engine.info.max_model_len
    each = LOGPROB_BYTES + 2 * ALTERNATIVE_BYTES
    chat = {"messages": [{"role": "user", "content": "a"}]}

    async def main() -> None:
        app = make_app(engine, max_logprobs_bytes=40 * each)
        for path, body, status in (
            (PATH, {"prompt": "a", "max_tokens": 40, "logprobs": 2}, 200),
            (PATH, {"prompt": "a", "max_tokens": 41, "logprobs": 2}, 400),
            (PATH, {"prompt": "a", "max_tokens": 41}, 200),
            (PATH, {"prompt": "a", "max_tokens": 10, "n": 4, "logprobs": 2}, 200),
            (PATH, {"prompt": "a", "max_tokens": 10, "n": 5, "logprobs": 2}, 400),
            (PATH, {"prompt": ["a"] * 5, "max_tokens": 10, "logprobs": 2, "stream": True}, 400),
            (PATH, {"prompt": "a" * 40, "max_tokens": 1, "prompt_logprobs": 2}, 200),
            (PATH, {"prompt": "a" * 41, "max_tokens": 1, "prompt_logprobs": 2}, 400),
            (PATH, {"prompt": "a" * 39, "max_tokens": 1, "echo": True, "logprobs": 2}, 200),
            (PATH, {"prompt": "a" * 40, "max_tokens": 1, "echo": True, "logprobs": 2}, 400),
            # No more than the context has room for.
            (PATH, {"prompt": [1] * (longest - 40), "max_tokens": longest, "logprobs": 2}, 200),
            (CHAT, {**chat, "logprobs": True, "top_logprobs": 2}, 400),
            (CHAT, {**chat, "logprobs": True, "top_logprobs": 2, "max_tokens": 40}, 200),
        ):
            call = Call(app, path, body)
            await call.task
            assert call.status == status, (body, call.body)
            if status == 400:
                assert '"param":"logprobs"' in call.body.decode()
        assert app.num_live == 0

    run(main)


def test_ids_of_the_engine_are_nobodys_choice() -> None:
    """Neither of a request with several prompts, nor of one that its client has left and sends again."""
    engine = FakeEngine(paused=True)

    async def main() -> None:
        app = make_app(engine)
        body = {"prompt": "b", "max_tokens": 1}
        many = Call(app, PATH, {"prompt": ["a", "b"], "request_id": "job", "max_tokens": 1})
        others = [Call(app, PATH, {**body, "request_id": f"job-{i}"}) for i in range(2)]
        left = Call(app, PATH, {**body, "request_id": "again"})
        await spin()
        left.disconnect()
        await spin()
        again = Call(app, PATH, {**body, "request_id": "again"})
        await spin()
        assert len({request.id for request in engine.requests}) == 6
        engine.resume()
        for call in (many, *others, again):
            await call.task
            assert call.status == 200

    run(main)


@pytest.mark.parametrize(
    "bad",
    [
        {"port": 65536},
        {"port": -1},
        {"max_n": 0},
        {"keep_alive_seconds": 0.0},
        {"max_body_bytes": -1},
        {"max_body_bytes": 101, "max_held_bytes": 100},
        {"max_prompts": 11, "max_queued_requests": 10},
        {"api_key": ("",)},
        {"api_key": (" key",)},
        {"keep_alive_seconds": float("nan")},
        {"body_seconds": float("inf")},
        {"drain_seconds": -1.0},
        {"drain_seconds": float("nan")},
        {"metrics_prefix": "a b{"},
        {"metrics_prefix": "1:"},
        {"max_stop_strings": 17},
        {"max_stop_bytes": 1025},
    ],
)
def test_a_configuration_that_cannot_work_raises(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HttpConfig(**bad)


def test_keys_are_not_printed() -> None:
    assert "secret" not in repr(HttpConfig(api_key=("secret",)))
