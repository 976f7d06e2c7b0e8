"""Details of the wire by which clients of other servers find their way."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest

from tests.support.asgi import TEMPLATE, TOKENIZER, ask
from tests.support.fake_engine import INFO, FakeEngine, says

NOON = datetime(2026, 11, 28, 12)

USER = {"role": "user", "content": "hi"}
LONG = "x" * 300  # tokens; the context has 256


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models/", None),
        ("GET", "/health/", None),
        ("GET", "/v1/models/fake/", None),
        ("POST", "/v1/completions/", {"prompt": "a", "max_tokens": 1}),
        ("POST", "/v1/messages/count_tokens//", {"messages": [USER]}),
    ],
)
def test_a_slash_at_the_end(method: str, path: str, body: Any) -> None:
    assert ask(FakeEngine(says("x")), path, body, method=method).status_code == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"),
        ("/models", "/v1/models"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
    ],
)
def test_a_base_url_without_its_version(path: str, meant: str) -> None:
    response = ask(FakeEngine(), path, {"messages": [USER]})
    assert response.status_code == 404
    assert f"this server has {meant}: the client's base URL ends with" in response.json()["error"]["message"]


def test_a_path_that_is_nothing_gets_no_hint() -> None:
    assert ask(FakeEngine(), "/v1/weather").json()["error"]["message"] == "/v1/weather: no such route"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": [[97], [97] * 300]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": LONG}, "input"),
    ],
)
def test_a_prompt_beyond_the_context_in_openais_words(path: str, body: dict[str, Any], param: str) -> None:
    error = ask(FakeEngine(), path, body).json()["error"]
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens: expected ≤ 255 tokens"
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


@pytest.mark.parametrize("length", [300, 100_000])
def test_a_prompt_beyond_the_context_in_anthropics_words(length: int) -> None:
    body = {"messages": [{"role": "user", "content": "x" * length}]}
    error = ask(FakeEngine(), "/v1/messages", body).json()["error"]
    tokens = len(TEMPLATE.render([{"role": "user", "content": ""}], now=NOON)) + length
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 255 maximum", error["message"])
    assert error["type"] == "invalid_request_error" and found is not None
    assert 255 < int(found[1]) <= tokens  # a bound: such a text is not tokenised


def test_optional_fields_of_messages_are_absent_and_not_null() -> None:
    body = {"messages": [USER], "max_tokens": 5}
    whole = ask(FakeEngine(says("hi")), "/v1/messages", body).json()
    assert [block.keys() for block in whole["content"]] == [{"type", "text"}]
    stream = ask(FakeEngine(says("hi")), "/v1/messages", {**body, "stream": True}).text
    assert '"content_block":{"type":"text","text":""}' in stream


def test_the_length_of_a_responses_input() -> None:
    body = {"input": "hello", "instructions": "be brief", "tools": [{"type": "function", "name": "f"}]}
    engine = FakeEngine(says("x"))
    response = ask(engine, "/v1/responses/input_tokens", body)
    assert response.status_code == 200, response.text
    chat = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    counted = ask(engine, "/tokenize", chat).json()["count"]
    assert response.json() == {"object": "response.input_tokens", "input_tokens": counted}
    assert not engine.requests


def test_what_the_tokenizer_is() -> None:
    info = ask(FakeEngine(), "/tokenizer_info").json()
    assert info["chat_template"] == TEMPLATE.source
    assert info["eos_token_ids"] == list(TOKENIZER.eos_token_ids)
    assert info["model_max_length"] == INFO.max_model_len
    assert {name: info[name] for name in TOKENIZER.config.special_tokens} == TOKENIZER.config.special_tokens


def test_line_ends_of_unicode_are_escaped_in_streams() -> None:
    text = "a\u2028b\u2029c\u0085d é"
    body = {"prompt": "x", "stream": True, "max_tokens": len(text.encode())}
    answer = ask(FakeEngine(says(text)), "/v1/completions", body).text
    shown = ""
    for line in answer.splitlines():
        assert not line or line.startswith("data: ")
        if line.startswith("data: {"):
            shown += json.loads(line[6:])["choices"][0]["text"]
    assert shown == text


def test_a_byte_order_mark_before_a_body() -> None:
    assert ask(FakeEngine(says("x")), "/v1/completions", b'\xef\xbb\xbf{"prompt": "a"}').status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [USER]})]
)
def test_a_stop_string_that_is_a_special_token_stops_by_its_id(path: str, body: dict[str, Any]) -> None:
    token = TOKENIZER.eos_token_ids[0]
    name = TOKENIZER.token_string(token)
    engine = FakeEngine(lambda request, index: [104, 105])
    assert ask(engine, path, {**body, "stop": [name, "zz"]}).status_code == 200
    assert engine.requests[0].sampling.stop_token_ids == (token,)
    plain = FakeEngine(says("hi"))
    assert ask(plain, path, {**body, "stop": ["zz"]}).status_code == 200
    assert plain.requests[0].sampling.stop_token_ids == ()
