"""What the model itself says of sampling holds for chats, where the server is asked to obey it."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.contract.request import SamplingParams
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.generation_config import generation_defaults, overrides
from tests.support.asgi import TEMPLATE, TOKENIZER
from tests.support.fake_engine import FakeEngine, says
from tests.support.scripted import ask_app

USER = {"role": "user", "content": "hi"}
# Qwen3's, with two more.
GIVEN = {
    "do_sample": True, "eos_token_id": [151645], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1,
    "repetition_penalty": 1.05, "max_new_tokens": 7, "transformers_version": "4.51.0",
}  # fmt: skip
CHATS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER]},
}


def app_of(given: dict[str, Any], **config: Any) -> tuple[App, FakeEngine]:
    engine = FakeEngine(says("a" * 50))
    return create_app(engine, TOKENIZER, TEMPLATE, HttpConfig(**config), generation=given), engine


def sampled(path: str, body: dict[str, Any], given: dict[str, Any], **config: Any) -> SamplingParams:
    app, engine = app_of(given, **{"generation_config": "auto", **config})
    answer = ask_app(app, path, body)
    assert answer.status_code == 200, answer.text
    return engine.requests[0].sampling


@pytest.mark.parametrize("path", CHATS)
def test_chats_take_its_defaults_and_requests_have_the_last_word(path: str) -> None:
    got = sampled(path, CHATS[path], GIVEN)
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.6, 20, 0.95, 0.1)
    assert (got.repetition_penalty, got.max_tokens) == (1.05, 7)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    own = {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1, limit: 3}
    got = sampled(path, {**CHATS[path], **own}, GIVEN)
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0, 0, 1, 0)
    assert (got.repetition_penalty, got.max_tokens) == (1, 3)


@pytest.mark.parametrize("path", CHATS)
def test_without_the_flag_it_says_nothing(path: str) -> None:
    got = sampled(path, CHATS[path], GIVEN, generation_config="none")
    assert (got.temperature, got.top_k, got.top_p, got.max_tokens) == (1.0, 0, 1.0, None)


def test_completions_keep_their_own() -> None:
    got = sampled("/v1/completions", {"prompt": "a"}, GIVEN)
    assert (got.temperature, got.top_k, got.max_tokens) == (0.0, 50, 128)


@pytest.mark.parametrize(("given", "drawn"), [(GIVEN, (20, 0.95, 0.1)), ({}, (0, 1.0, 0.0))])
def test_completions_with_a_temperature_draw_as_the_model_says(
    given: dict[str, Any], drawn: tuple[float, ...]
) -> None:
    got = sampled("/v1/completions", {"prompt": "a", "temperature": 0.8}, given)
    assert (got.temperature, got.max_tokens) == (0.8, 128)
    assert (got.top_k, got.top_p, got.min_p) == drawn
    asked = sampled("/v1/completions", {"prompt": "a", "temperature": 0.8, "top_k": 3}, given)
    assert asked.top_k == 3


def test_the_model_says_what_is_in_force() -> None:
    app, _ = app_of(GIVEN)
    told = ask_app(app, "/v1/models").json()["data"][0]["default_sampling_params"]
    assert (told["temperature"], told["top_k"], told["top_p"], told["max_tokens"]) == (0.6, 20, 0.95, 7)


def test_the_metadata_of_a_file_says_the_same() -> None:
    given = {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.1,
    }
    got = sampled("/v1/chat/completions", CHATS["/v1/chat/completions"], given)
    assert (got.temperature, got.top_k, got.repetition_penalty) == (0.5, 40, 1.1)


def test_a_model_that_does_not_draw_is_greedy() -> None:
    given = {"do_sample": False, "temperature": 0.6}
    assert sampled("/v1/messages", CHATS["/v1/messages"], given).temperature == 0


def test_answers_and_documents_tell_what_is_in_force() -> None:
    app, _ = app_of(GIVEN, generation_config="auto")
    answer = ask_app(app, "/v1/responses", CHATS["/v1/responses"]).json()
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    message = ask_app(app, "/v1/messages", CHATS["/v1/messages"]).json()
    assert message["stop_reason"] == "max_tokens"
    schemas = ask_app(app, "/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "ResponsesRequest", "MessagesRequest"):
        limit = "max_output_tokens" if name == "ResponsesRequest" else "max_tokens"
        fields = schemas[name]["properties"]
        assert (fields["temperature"]["default"], fields[limit]["default"]) == (0.6, 7)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1}, {"temperature": "hot"}, {"temperature": True}, {"top_p": 0}, {"top_k": 2.5},
        {"repetition_penalty": 0}, {"max_new_tokens": 0}, {"temperature": float("nan")},
    ],
)  # fmt: skip
def test_values_that_no_request_may_have_are_a_fault(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        app_of(given, generation_config="auto")
    app_of(given, generation_config="none")  # and nobody's affair where it is not obeyed


def test_overrides_go_before_the_model() -> None:
    found = generation_defaults({"temperature": 0.6, "top_k": 5, **overrides('{"temperature": 0.2}')})
    assert (found.temperature, found.top_k) == (0.2, 5)
    assert overrides("") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "no sampling defaults; expected a JSON object of .*; got list"),
        ('{"temprature": 1}', "no sampling defaults; expected .*temperature.*; got temprature"),
    ],
)
def test_faulty_overrides(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        overrides(text)
