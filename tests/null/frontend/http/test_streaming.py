from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.event import FinishReason, TokenEvent
from tests.support.asgi import Call, ask, events, make_app, run, spin, stream_text
from tests.support.fake_engine import FakeEngine, says

COMPLETION = {"prompt": "hi", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
BOTH = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def stream(path: str, body: dict[str, Any], script: Any = "hello", **config: Any) -> list[Any]:
    engine = FakeEngine(says(script) if isinstance(script, str) else script)
    response = ask(engine, path, body, **config)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_a_completion_streams_in_openais_shape() -> None:
    chunks = stream("/v1/completions", {**COMPLETION, "max_tokens": 3})
    assert chunks.pop() == "[DONE]"
    assert len({c["id"] for c in chunks}) == 1
    assert all(c["object"] == "text_completion" and "usage" not in c for c in chunks)
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "h", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "l", "logprobs": None, "finish_reason": "length"}],
    ]


def test_a_chat_streams_in_openais_shape() -> None:
    chunks = stream("/v1/chat/completions", {**CHAT, "max_tokens": 3})
    assert chunks.pop() == "[DONE]"
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": "h"},
        {"content": "e"},
        {"content": "l"},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length"]


def test_a_chat_of_no_text_still_has_its_role() -> None:
    chunks = stream("/v1/chat/completions", CHAT, lambda r, i: [257])
    assert [c["choices"][0] for c in chunks[:-1]] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_usage_comes_last_and_only_on_request(path: str, body: dict[str, Any]) -> None:
    body = {**body, "max_tokens": 4}
    plain = stream(path, body)
    assert all("usage" not in c for c in plain[:-1])
    asked = stream(path, {**body, "stream_options": {"include_usage": True}})
    *chunks, last, done = asked
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 4
    assert all(c["usage"] is None and c["choices"] for c in chunks)


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_continuous_usage_counts_up(path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = stream(path, {**body, "max_tokens": 3, "stream_options": options})
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3]
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_stream_options_do_not_change_an_answer_in_one_piece(path: str, body: dict[str, Any]) -> None:
    for stream_value in (False, None):
        options = {"stream_options": {"include_usage": True}, "stream": stream_value}
        response = ask(FakeEngine(), path, {**body, **options})
        assert response.status_code == 200
        assert response.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize(
    "script", [(0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 33), ((0xC3, 0xA9, 0xF0), 0x9F, (0x98, 0x80, 33))]
)
def test_characters_are_never_split(path: str, body: dict[str, Any], script: Any) -> None:
    chunks = stream(path, {**body, "max_tokens": 7}, lambda r, i: script)
    assert "�" not in str(chunks)
    assert stream_text(chunks) == "é😀!"


@pytest.mark.parametrize(("path", "body"), BOTH)
@pytest.mark.parametrize("stop", [None, ["world"], ["wox"], ["o w", "zz"], ["d!"], ["h"]])
def test_a_streams_text_is_that_of_the_whole_answer(path: str, body: dict[str, Any], stop: Any) -> None:
    body = {**body, "stop": stop, "max_tokens": 12, "n": 2}
    chunks = stream(path, body, "hello world!")
    whole = ask(FakeEngine(says("hello world!")), path, {**body, "stream": False}).json()
    for choice in whole["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert stream_text(chunks, choice["index"]) == text
        ends = [
            c["finish_reason"]
            for chunk in chunks[:-1]
            for c in chunk["choices"]
            if c["index"] == choice["index"] and c["finish_reason"]
        ]
        assert ends == [choice["finish_reason"]]


def test_logprobs_stay_with_their_text() -> None:
    script = lambda r, i: [97, (98, 99, 0xC3), 0xA9, (100, 101)]  # noqa: E731
    chunks = stream("/v1/completions", {**COMPLETION, "max_tokens": 7, "logprobs": 0}, script)
    choices = [c["choices"][0] for c in chunks[:-1]]
    assert [(c["text"], c["logprobs"]["tokens"], c["logprobs"]["text_offset"]) for c in choices] == [
        ("a", ["a"], [0]),
        ("bc", ["b", "c"], [1, 2]),
        ("é", ["bytes:\\xc3", "bytes:\\xa9"], [3, 3]),
        ("de", ["d", "e"], [4, 5]),
    ]


def test_echo_comes_first_once_for_each_choice() -> None:
    chunks = stream("/v1/completions", {**COMPLETION, "echo": True, "max_tokens": 2, "n": 2})
    assert [stream_text(chunks, i) for i in range(2)] == ["hihe", "hihe"]
    assert chunks[0]["choices"][0]["text"] == "hih"


def test_token_ids_come_even_with_tokens_that_have_no_text() -> None:
    chunks = stream(
        "/v1/completions",
        {**COMPLETION, "max_tokens": 2, "return_token_ids": True},
        lambda r, i: [0xC3, 0xA9],
    )
    assert [c["choices"][0]["token_ids"] for c in chunks[:-1]] == [[0xC3], [0xA9]]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks[:-1]] == [[104, 105], None]


def test_prompt_logprobs_cannot_be_streamed() -> None:
    for path, body in BOTH:
        error = ask(FakeEngine(), path, {**body, "prompt_logprobs": 1}).json()["error"]
        assert error["param"] == "prompt_logprobs"


def test_one_write_for_what_one_step_brought() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(make_app(engine), "/v1/completions", {**COMPLETION, "n": 4, "max_tokens": 2})
        await spin()
        assert call.status is None  # nothing is said before there is something to say
        engine.step()
        await call.until(lambda: bool(call.writes))
        assert len(call.writes) == 1
        assert len(events(call.writes[0])) == 4
        engine.step()
        await call.until(lambda: call.ended)
        assert len(call.writes) == 2
        assert events(call.body)[-1] == "[DONE]"
        await call.task

    run(main)


def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(
            make_app(engine, keep_alive_seconds=0.01), "/v1/completions", {**COMPLETION, "max_tokens": 1}
        )
        await call.until(lambda: len(call.writes) >= 3)
        assert call.status == 200
        assert set(call.writes) == {b": keep-alive\n\n"}
        engine.resume()
        await call.until(lambda: call.ended)
        assert stream_text(events(call.body)) == "h"
        await call.task

    run(main)


def test_choices_that_stopped_are_not_spoken_of_again() -> None:
    """Events beyond a stop string bring nothing, not even a comment."""
    engine = FakeEngine(lambda r, i: list(b".abc" if i == 0 else b"xyzw"), paused=True)

    async def main() -> None:
        body = {**COMPLETION, "n": 2, "stop": ".", "max_tokens": 4}
        call = Call(make_app(engine), "/v1/completions", body)
        await spin()
        for _ in range(4):
            engine.step()
            await spin()
        await call.task
        assert b"keep-alive" not in call.body
        chunks = events(call.body)
        assert [c["choices"][0]["index"] for c in chunks[:-1]] == [0, 1, 1, 1, 1]

    run(main)


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_an_error_before_the_first_byte_has_a_status(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(make_app(engine), path, body)
        await spin()
        refusal = TokenEvent(
            request_id=engine.requests[0].id,
            finish=FinishReason.ERROR,
            error="full",
            error_kind="QueueFullError",
            retry_after=7.0,
        )
        engine.fail(engine.requests[0].id, refusal)
        await call.task
        assert call.status == 503
        assert call.headers["retry-after"] == "7"
        assert b'"full"' in call.body

    run(main)


@pytest.mark.parametrize(("path", "body"), BOTH)
def test_an_error_after_the_first_byte_is_an_event(path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(make_app(engine), path, body)
        await spin()
        engine.step()
        await call.until(lambda: bool(call.writes))
        engine.fail(
            engine.requests[0].id,
            TokenEvent(request_id=engine.requests[0].id, finish=FinishReason.ERROR, error="no finite logits"),
        )
        await call.task
        *_, error, done = events(call.body)
        assert error == {
            "error": {"message": "no finite logits", "type": "server_error", "param": None, "code": None}
        }
        assert done == "[DONE]"
        assert call.ended

    run(main)


def test_one_failed_choice_leaves_the_others() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(make_app(engine), "/v1/completions", {**COMPLETION, "n": 2, "max_tokens": 3})
        await spin()
        engine.step()
        await call.until(lambda: bool(call.writes))
        request_id = engine.requests[0].id
        engine.fail(
            request_id,
            TokenEvent(request_id=request_id, index=1, finish=FinishReason.ERROR, error="no finite logits"),
        )
        engine.resume()
        await call.task
        chunks = events(call.body)
        assert chunks[-1] == "[DONE]"
        ends = {
            c["index"]: c["finish_reason"] for k in chunks[:-1] for c in k["choices"] if c["finish_reason"]
        }
        assert ends == {0: "length", 1: "error"}
        assert stream_text(chunks, 0) == "hel"

    run(main)


def test_a_dead_engine_ends_the_stream_once() -> None:
    engine = FakeEngine(paused=True)

    async def main() -> None:
        call = Call(make_app(engine), "/v1/completions", {**COMPLETION, "n": 3})
        await spin()
        engine.step()
        await call.until(lambda: bool(call.writes))
        engine.die()
        await call.task
        *_, error, done = events(call.body)
        assert error["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
        assert sum("error" in c for c in events(call.body) if isinstance(c, dict)) == 1

    run(main)
