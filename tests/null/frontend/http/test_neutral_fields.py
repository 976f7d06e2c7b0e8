"""What asks for nothing and what cannot change the answer is accepted, on every route and at every depth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pegainfer.contract.request import SamplingParams
from tests.support.asgi import ask
from tests.support.fake_engine import INFO, FakeEngine, says

COMPLETIONS, CHAT, RESPONSES, MESSAGES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
)
EMBEDDINGS, COUNT = "/v1/embeddings", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER]},
    COUNT: {"messages": [USER]},
    EMBEDDINGS: {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/apply_template": {"messages": [USER]},
}
GENERATING = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def roomy_engine() -> FakeEngine:
    """An engine whose context holds a prompt that shows tools."""
    return FakeEngine(says("x"), info=msgspec.structs.replace(INFO, max_model_len=4096))


def status(path: str, body: dict[str, Any]) -> int:
    response = ask(roomy_engine(), path, body)
    assert response.status_code in (200, 400), response.text
    return response.status_code


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_field_that_asks_for_nothing(path: str, value: Any) -> None:
    assert status(path, {**BODIES[path], "no_such_field": value}) == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [True, 0, 1, "x", [None], {"a": None}])
def test_an_unknown_field_that_asks_for_something(path: str, value: Any) -> None:
    assert status(path, {**BODIES[path], "no_such_field": value}) == 400


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("add_bos", "use add_special_tokens"),
        ("do_sample", "use temperature: 0"),
        ("think", "use reasoning_effort"),
        ("detokenize", ""),
        ("parse_special", ""),
    ],
)
def test_a_false_that_asks_for_something(path: str, name: str, remedy: str) -> None:
    """Of fields that are on by default elsewhere: ignored, the answer would be another one."""
    response = ask(roomy_engine(), path, {**BODIES[path], name: False})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(f"{name}: unknown field") and message.endswith(remedy)


@pytest.mark.parametrize("path", GENERATING)
def test_samplers_that_are_turned_off(path: str) -> None:
    """As chat programs send them with every request."""
    off = {
        "top_a": 0, "tfs": 1, "typical": 1, "typical_p": 1.0, "mirostat_mode": 0, "dry_multiplier": 0,
        "top_n_sigma": -1, "dynatemp_range": 0, "smoothing_factor": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
        "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "penalty_alpha": 0, "num_beams": 1,
        "guidance_scale": 1, "n_keep": 0, "xtc_probability": 0, "repeat_penalty": 1, "do_sample": True,
    }  # fmt: skip
    assert status(path, {**BODIES[path], **off}) == 200
    for name in ("top_a", "dry_multiplier", "smoothing_factor", "no_repeat_ngram_size", "num_beams"):
        assert status(path, {**BODIES[path], name: 2}) == 400


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "flex"},
        {"prompt_cache_retention": "24h"},
        {"verbosity": "low"},
        {"cache_prompt": True},
        {"keep_alive": "5m"},
        {"prediction": {"type": "content", "content": "a"}},
        {"best_of": 1},
        {"store": False},
        {"length_penalty": 1.0},
        {"use_beam_search": False},
        {"mirostat": 0},
        {"documents": []},
        {"seed": -1},
        {"web_search_options": None},
        {"thread": {"type": "create"}},
        {"repeat_penalty": 1},
    ],
)
def test_what_cannot_change_the_answer(path: str, fields: dict[str, Any]) -> None:
    engine, plain = FakeEngine(says("x")), FakeEngine(says("x"))
    assert ask(engine, path, {**BODIES[path], **fields}).status_code == 200
    assert ask(plain, path, BODIES[path]).status_code == 200
    assert engine.requests[0].sampling == plain.requests[0].sampling
    assert engine.requests[0].prompt == plain.requests[0].prompt


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2},
        {"length_penalty": 2.0},
        {"use_beam_search": True},
        {"web_search_options": {}},
        {"best_of": True},
        {"mirostat": 2},
    ],
)
def test_what_would_change_the_answer_is_named(path: str, fields: dict[str, Any]) -> None:
    response = ask(FakeEngine(), path, {**BODIES[path], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(next(iter(fields)) + ": ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{**USER, "weather": None}]}),
        (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "returns": {}}}]}),
        (CHAT, {"tools": [{**TOOL, "cache": False}]}),
        (CHAT, {"response_format": {"type": "text", "schema": None}}),
        (CHAT, {"stream_options": {"chunk": None}}),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "mode": None}},
        ),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": None, "function": {"name": "f"}}}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "returns": {}}]}),
        (RESPONSES, {"reasoning": {"mode": None}}),
        (RESPONSES, {"input": [{"role": "user", "content": "hi", "phase": None}]}),
        (RESPONSES, {"input": [{"role": "user", "content": "hi", "phase": ""}]}),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}, "returns": {}}]}),
        (MESSAGES, {"messages": [{**USER, "weather": None}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": []}]}]}),
        (MESSAGES, {"system": [{"type": "text", "text": "a", "x": None}]}),
    ],
)
def test_within_objects(path: str, fields: dict[str, Any]) -> None:
    assert status(path, {**BODIES[path], **fields}) == 200


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"reasoning": "I greet."}, "I greet."),
        ({"reasoning_content": "I greet.", "reasoning": "other"}, "I greet."),
        (
            {
                "reasoning_details": [
                    {"type": "reasoning.text", "text": "I "},
                    {"type": "reasoning.text", "text": "do"},
                ]
            },
            "I do",
        ),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, ""),
        ({"reasoning": None, "reasoning_details": [], "reasoning_content": None}, ""),
        ({"provider_specific_fields": {"a": 1}, "id": "msg_1", "type": "message", "annotations": [{}]}, ""),
    ],
)
def test_an_answer_of_another_server_in_the_history(extra: dict[str, Any], shown: str) -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": "Hello.", **extra}, USER],
        "chat_template": "hi {% for m in messages %}{{ m.reasoning_content }}{% endfor %}",
    }
    response = ask(FakeEngine(), "/apply_template", body, request_chat_template=True)
    assert response.status_code == 200, response.text
    assert response.json()["prompt"] == "hi " + shown


def test_a_message_of_another_type_is_refused() -> None:
    response = ask(FakeEngine(), CHAT, {"messages": [{**USER, "type": "function_call_output"}]})
    assert response.json()["error"]["param"] == "messages[0].type"


def test_a_null_default_in_every_field_of_sampling() -> None:
    engine = FakeEngine(says("x"))
    assert ask(
        engine, CHAT, {**BODIES[CHAT], "seed": -1, "logit_bias": {}, "stop": [], "tools": []}
    ).is_success
    assert engine.requests[0].sampling == SamplingParams()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
        (MESSAGES, "max_tokens"),
    ],
)
def test_minus_one_token_is_no_bound(path: str, field: str) -> None:
    engine = FakeEngine()
    response = ask(engine, path, {**BODIES[path], field: -1})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    if "total_tokens" in usage:
        told = usage["total_tokens"]
    else:
        told = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert told == engine.info.max_model_len


def test_a_schema_is_left_as_it_is() -> None:
    """Nulls and empty values within free JSON are data."""
    engine = FakeEngine(says("x"))
    schema = {"type": "object", "properties": {"a": {"enum": [None, ""], "default": None}}, "description": ""}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "returns": None}}
    body = {
        "messages": [USER],
        "tools": [tool],
        "chat_template": "{{ messages[0].content }}{{ tools | tojson }}",
    }
    response = ask(engine, "/apply_template", body, request_chat_template=True)
    assert '"default": null' in response.json()["prompt"] and '"description": ""' in response.json()["prompt"]


@pytest.mark.parametrize(
    ("field", "value", "use"),
    [
        ("guided_json", {"type": "object"}, "structured_outputs.json"),
        ("n_predict", 4, "max_tokens"),
        ("grammar", "root ::= x", "structured_outputs.grammar"),
        ("functions", [{"name": "f"}], "tools"),
    ],
)
def test_fields_of_other_servers_are_refused_with_what_to_send(field: str, value: Any, use: str) -> None:
    error = ask(FakeEngine(), CHAT, {**BODIES[CHAT], field: value}).json()["error"]
    assert error["param"] == field and error["message"].endswith(f"; use {use}")


@pytest.mark.parametrize(
    ("given", "expected"), [({"thinking": False}, 200), ({"x": None}, 200), ({"x": 1}, 400)]
)
def test_a_template_variable_that_nothing_looks_up(given: dict[str, Any], expected: int) -> None:
    assert status(CHAT, {**BODIES[CHAT], "chat_template_kwargs": given}) == expected
