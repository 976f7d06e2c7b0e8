"""Tools beside a format: the model calls, or answers in the format, on every route."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from tests.null.frontend.grammar.test_compiler import tokenizer
from tests.support.asgi import ask
from tests.support.fake_engine import INFO, FakeEngine, says

SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
USER = {"role": "user", "content": "hi"}
ANSWER = json.dumps({"name": "Bob", "age": 3})
CALL = '<tool_call>\n{"name": "w", "arguments": {"city": "Rome"}}\n</tool_call>'
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "w", "parameters": PARAMETERS}}],
        "response_format": FORMAT,
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "w", "parameters": PARAMETERS}],
        "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": [USER],
        "tools": [{"name": "w", "input_schema": PARAMETERS}],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


def asked(path: str, said: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """The grammar that the engine got, and the answer to a model that says this."""
    engine = FakeEngine(says(said), info=msgspec.structs.replace(INFO, max_model_len=8192))
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = ask(engine, path, {**ROUTES[path], limit: len(said), **fields})
    assert response.status_code == 200, response.text
    grammar = engine.requests[0].grammar
    assert grammar is not None
    return grammar.text, response.json()


def obeys(grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("path", ROUTES)
def test_one_grammar_for_both(path: str) -> None:
    grammar, _ = asked(path, ANSWER)
    assert obeys(grammar, ANSWER)
    assert obeys(grammar, CALL)
    assert obeys(grammar, CALL + "\n" + CALL)
    for wrong in ("Hello", '{"name": "Bob"}', CALL + ANSWER, CALL.replace('"w"', '"v"'), ""):
        assert not obeys(grammar, wrong)


@pytest.mark.parametrize("path", ROUTES)
def test_where_a_call_is_required_only_calls(path: str) -> None:
    required = {"type": "any"} if path == "/v1/messages" else "required"
    grammar, _ = asked(path, CALL, tool_choice=required)
    assert obeys(grammar, CALL) and not obeys(grammar, ANSWER)


@pytest.mark.parametrize("path", ROUTES)
def test_where_no_call_may_be_only_the_format(path: str) -> None:
    none = {"type": "none"} if path == "/v1/messages" else "none"
    grammar, _ = asked(path, ANSWER, tool_choice=none)
    assert obeys(grammar, ANSWER) and not obeys(grammar, CALL)


@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "pythonic"])
def test_an_answer_in_the_format_is_content_in_every_family(parser: str) -> None:
    engine = FakeEngine(says(ANSWER), info=msgspec.structs.replace(INFO, max_model_len=8192))
    body = {**ROUTES["/v1/chat/completions"], "max_tokens": len(ANSWER)}
    response = ask(engine, "/v1/chat/completions", body, tool_call_parser=parser)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (ANSWER, None)
    grammar = engine.requests[0].grammar
    assert grammar is not None and obeys(grammar.text, ANSWER)
    if parser == "llama3_json":
        assert obeys(grammar.text, '{"name": "w", "parameters": {"city": "Rome"}}')
        assert not obeys(grammar.text, '{"name": "v", "parameters": {"city": "Rome"}}')


def test_the_tool_whose_schema_is_at_fault_is_named() -> None:
    good = {"type": "function", "function": {"name": "a", "parameters": PARAMETERS}}
    faulty = {"type": "object", "properties": {"x": {"type": "no-type"}}}
    bad = {"type": "function", "function": {"name": "b", "parameters": faulty}}
    body = {"messages": [USER], "tools": [good, bad], "tool_choice": "required"}
    engine = FakeEngine(info=msgspec.structs.replace(INFO, max_model_len=8192))
    error = ask(engine, "/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
