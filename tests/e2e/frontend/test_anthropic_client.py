"""The official Anthropic client against real server processes: the null device and the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.support.default_model import default_model
from tests.support.server import Server, serving

KEY = "a-key"
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
GREEDY = {"temperature": 0}
TOOL: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module", params=["null", "smollm2"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    model = ["--device", "null"] if request.param == "null" else [str(default_model())]
    with serving(*model, "--served-model-name", "m", "--api-key", KEY) as process:
        yield process


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key=KEY, auth_token=None, max_retries=0) as client:
        yield client


def test_a_stream_is_the_whole_message(client: Anthropic) -> None:
    body: dict[str, Any] = {
        "model": "m", "messages": ASK, "max_tokens": 20, "system": "Be brief.", "extra_body": GREEDY,
    }  # fmt: skip
    whole = client.messages.create(**body)
    (block,) = whole.content
    assert block.type == "text" and block.text
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [b.text for b in final.content] == [text] == [block.text]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    events = [event.type for event in client.messages.create(**body, stream=True)]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    with Anthropic(base_url=str(client.base_url), api_key=None, auth_token=KEY, max_retries=0) as bearer:
        assert bearer.messages.create(**body).content == whole.content


def test_tokens_are_counted_as_they_are_served(client: Anthropic) -> None:
    count = client.messages.count_tokens(model="m", messages=ASK, system="Be brief.")
    answer = client.messages.create(model="m", messages=ASK, system="Be brief.", max_tokens=1)
    cached = answer.usage.cache_read_input_tokens or 0
    assert count.input_tokens == answer.usage.input_tokens + cached


def test_a_call_and_its_result(client: Anthropic) -> None:
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 300,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**body, messages=ASK, tool_choice=choice)
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use" and isinstance(call.input["city"], str)
    with client.messages.stream(**body, messages=ASK, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input == call.input
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: list[Any] = [*ASK, first.to_param(), {"role": "user", "content": [result]}]
    second = client.messages.create(**body, messages=history, tool_choice={"type": "none"})
    assert second.stop_reason in ("end_turn", "max_tokens")


def test_models(client: Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == ("m", "model", "m")
    assert client.models.retrieve("m") == model
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")


def test_an_answer_that_has_begun_and_a_stop_sequence(client: Anthropic) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The weather is"}]
    answer = client.messages.create(model="m", messages=begun, max_tokens=30, stop_sequences=["a", "e", " "])
    assert answer.stop_reason in ("stop_sequence", "max_tokens", "end_turn")
    if answer.stop_reason == "stop_sequence":
        assert answer.stop_sequence in ("a", "e", " ")


def test_faults_are_the_clients_own_exceptions(client: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="m", messages=ASK, max_tokens=0)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=ASK, max_tokens=9)
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="other").messages.create(model="m", messages=ASK, max_tokens=9)
