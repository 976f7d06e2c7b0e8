"""Broken bodies: a 400 with a reason, and the engine never hears of them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from pegainfer.frontend.http.api_docs.operations import OPERATIONS
from pegainfer.frontend.http.app import _ROUTES
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.body import load_json
from tests.support.asgi import ask, client, make_app, run
from tests.support.fake_engine import FakeEngine

DEEP = 64
TEXT = "(a text of JSON)"
ROUTES = tuple(op.path for op in OPERATIONS if op.request is not None)

BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "nothing"),
    "blanks": (b" \n\t", "nothing"),
    "syntax": (b'{"prompt": "a"', "syntax error at line 1 column 15"),
    "trailing": (b'{"prompt": "a"} x', "syntax error"),
    "comma": (b'{"prompt": "a",}', "syntax error"),
    "single quotes": (b"{'prompt': 'a'}", "syntax error"),
    "array": (b"[1, 2]", "expected a JSON object, got an array"),
    "string": (b'"prompt"', "expected a JSON object, got a string"),
    "number": (b"17", "expected a JSON object, got a number"),
    "null": (b"null", "expected a JSON object, got null"),
    "true": (b"true", "expected a JSON object, got a boolean"),
    "NaN": (b'{"temperature": NaN}', "NaN"),
    "Infinity": (b'{"temperature": Infinity}', "Infinity"),
    "minus Infinity": (b'{"temperature": -Infinity}', "-Infinity"),
    "float overflow": (b'{"temperature": 1e999}', "1e999 is out of range"),
    "long integer": (b'{"max_tokens": ' + b"9" * 5000 + b"}", "too many digits"),
    "duplicate key": (b'{"prompt": "a", "n": 1, "prompt": "b"}', "prompt: given twice"),
    "nested duplicate": (b'{"prompt": "a", "logit_bias": {"1": 2, "1": 3}}', "1: given twice"),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "invalid byte at offset 12"),
    "half a UTF-8 character": (b'{"prompt": "\xe2\x82"}', "invalid byte at offset 12"),
    "UTF-8 surrogate": (b'{"prompt": "\xed\xa0\x80"}', "invalid byte"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "invalid byte"),
    "two byte order marks": (b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', "syntax error"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', "surrogate"),
    "lone low surrogate": (b'{"prompt": "x", "stop": ["\\udfff"]}', "surrogate"),
    "surrogate in a key": (b'{"\\uDabc": 1}', "surrogate"),
    "control character": (b'{"prompt": "a\x01"}', "syntax error"),
    "deep lists": (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", "nested too deeply"),
    "deep objects": (b'{"response_format": ' + b'{"a":' * 70 + b"1" + b"}" * 71, "nested too deeply"),
    "very deep": (b"[" * 100_000, "nested too deeply"),
    "very deep and closed": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("path", ROUTES)
def test_a_broken_body_is_a_400_with_a_reason(path: str, name: str) -> None:
    body, reason = BROKEN[name]
    engine = FakeEngine()
    response = ask(engine, path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 2000
    assert not engine.requests


def test_these_are_all_routes_that_take_a_body() -> None:
    assert len(ROUTES) == 18
    taken = {path for method, path, _ in _ROUTES if method == "POST"}
    assert taken - set(ROUTES) == {"/v1/responses/{id}/cancel", "/debug/trace"}


@pytest.mark.parametrize("depth", [1, DEEP - 1, DEEP, DEEP + 1])
def test_the_depth_limit_is_exact(depth: int) -> None:
    text = ("[" * (depth - 1) + "]" * (depth - 1)) or "1"
    # Brackets beside each other do not count: only their nesting does.
    body = f'{{"a": {text}, "flat": {[[]] * 100}}}'.encode()
    if depth <= DEEP:
        assert isinstance(load_json(body, DEEP), dict)
    else:
        with pytest.raises(ApiError, match="nested too deeply"):
            load_json(body, DEEP)


def test_good_json_is_read_as_it_is() -> None:
    value = {"text": 'é😀 [[[{{{ \\ud800 "', "list": [[1, -2.5, 1e300], True, None], "empty": {}}
    for ensure_ascii in (True, False):
        raw = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        assert load_json(raw, 8) == value


def test_a_surrogate_pair_is_a_character() -> None:
    assert load_json(b'{"a": "\\ud83d\\ude00"}', 8) == {"a": "😀"}


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("temperature", "hot", "expected float | null, got str"),
    ("temperature", True, "expected float | null, got bool"),
    ("max_tokens", 1.5, "expected int | null, got float"),
    ("max_tokens", "1", "expected int | null, got str"),
    ("max_tokens", [1], "expected int | null, got array"),
    ("n", False, "expected int | null, got bool"),
    ("stream", 1, "expected bool | null, got int"),
    ("stream", "true", "expected bool | null, got str"),
    ("stop", 3, "expected str | array | null, got int"),
    ("stop", {"a": 1}, "expected str | array | null, got object"),
    ("logit_bias", [1, 2], "expected object | null, got array"),
    ("seed", 0.5, "expected int | null, got float"),
    ("model", 7, "expected str | null, got int"),
    ("stream_options", True, "expected object | null, got bool"),
    ("user", ["me"], "expected str | null, got array"),
]


@pytest.mark.parametrize(("field", "value", "reason"), WRONG_TYPES)
@pytest.mark.parametrize("path", ROUTES[:2])
def test_a_wrong_type_names_the_field(path: str, field: str, value: Any, reason: str) -> None:
    engine = FakeEngine()
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = ask(engine, path, {**body, field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"] == f"{field}: {reason}"
    assert not engine.requests


def test_a_wrong_type_inside_names_the_place() -> None:
    engine = FakeEngine()
    for body, param in (
        ({"prompt": "a", "stop": ["x", 1]}, "stop[1]"),
        (
            {"prompt": "a", "stream_options": {"include_usage": 1}, "stream": True},
            "stream_options.include_usage",
        ),
        ({"prompt": "a", "stream_options": {"what": 1}, "stream": True}, "stream_options.what"),
        ({"prompt": [[1, 2], [3, "x"]]}, "prompt[1][1]"),
        ({}, "prompt"),
    ):
        error = ask(engine, "/v1/completions", body).json()["error"]
        assert error["param"] == param, error
        assert error["message"].startswith(param + ": ")
    assert not engine.requests


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_field_is_named(path: str) -> None:
    engine = FakeEngine()
    response = ask(engine, path, {"no_such_field": 1})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("no_such_field: unknown field")
    assert not engine.requests


def test_a_long_field_name_is_not_echoed_whole() -> None:
    response = ask(FakeEngine(), "/v1/completions", {"x" * 100_000: 1, "prompt": "a"})
    assert response.status_code == 400
    assert len(response.content) < 2000


def test_a_large_body_is_parsed_off_the_loop_with_the_same_checks() -> None:
    engine = FakeEngine()
    good = {"prompt": "a", "user": None, "stop": None, "model": "fake", "bad_words": None}
    padding = " " * 200_000
    raw = json.dumps({**good, "max_tokens": 3}).encode() + padding.encode()
    assert ask(engine, "/v1/completions", raw).status_code == 200
    assert ask(engine, "/v1/completions", b"{" + padding.encode() + b'"prompt": NaN}').status_code == 400
    assert len(engine.requests) == 1


def sent(path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and the error's message of one request, which must not reach the engine where it is refused."""
    engine = FakeEngine()
    out: list[tuple[int, str]] = []

    async def main() -> None:
        async with client(make_app(engine)) as http:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            answer = await http.post(path, content=body, headers=named)
            message = answer.json()["error"]["message"] if answer.status_code != 200 else ""
            out.append((answer.status_code, message))

    run(main)
    assert len(engine.requests) == (out[0][0] == 200)
    return out[0]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["content_encoding", "transfer_encoding"])
def test_a_compressed_body_is_refused(path: str, name: str) -> None:
    status, message = sent(path, gzip.compress(b"{}"), **{name: "gzip"})
    assert status == 400 and name.replace("_", "-") in message.lower()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=x", "x"]
)
def test_a_body_that_says_it_is_no_json_is_refused(path: str, kind: str) -> None:
    status, message = sent(path, b"{}", content_type=kind)
    assert status == 415 and message.startswith("Content-Type: expected application/json")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content_type": ""}, 200),
        ({"content_type": "application/json"}, 200),
        ({"content_type": "Application/JSON; charset=utf-8"}, 200),
        ({"content_type": "application/vnd.api+json"}, 200),
        ({"content_type": "application/x-www-form-urlencoded"}, 200),  # curl -d
        ({"content_type": "application/x-www-form-urlencoded", "sec_fetch_mode": "no-cors"}, 415),
        ({"content_type": "application/x-www-form-urlencoded", "origin": "http://localhost"}, 415),
    ],
)
def test_what_may_be_said_of_json(headers: dict[str, str], status: int) -> None:
    assert sent("/v1/completions", b'{"prompt": "a", "max_tokens": 1}', **headers)[0] == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": TEXT}}]}
                ]
            },
        ),
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": TEXT}]},
        ),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": TEXT}}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"structural_tag": TEXT}}),
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[" * 100_000,
        '{"a": 1' + "0" * 5000 + "}",
    ],
)
def test_json_within_a_string_is_read_as_strictly(path: str, body: dict[str, Any], text: str) -> None:
    raw = json.dumps(body).replace(json.dumps(TEXT), json.dumps(text)).encode()
    status, message = sent(path, raw)
    assert status == 400 and message


@pytest.mark.parametrize("field", ["json", "structural_tag"])
def test_a_schema_as_text_gives_no_key_twice_and_no_half_characters(field: str) -> None:
    for text in ('{"a": 1, "a": 2}', '{"a": "\\ud800"}'):
        body = {"prompt": "a", "structured_outputs": {field: text}}
        assert sent("/v1/completions", json.dumps(body).encode())[0] == 400


def test_half_a_character_within_the_arguments_of_a_call_harms_nobody() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    body = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}], "max_tokens": 1}
    assert sent("/v1/chat/completions", json.dumps(body).encode())[0] == 200
