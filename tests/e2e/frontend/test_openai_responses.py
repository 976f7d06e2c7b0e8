"""The responses API through the official client, on the null device and on the default model."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

ASK = "How is the weather in Paris?"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Weather(BaseModel):
    city: str = Field(max_length=20)
    days: int = Field(ge=0, le=9)


def test_a_stream_is_the_whole_response(client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "m", "input": ASK, "instructions": "Be brief.", "temperature": 0, "max_output_tokens": 20,
    }  # fmt: skip
    whole = client.responses.create(**body)
    assert whole.output_text and whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    plain = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in plain] == list(range(len(plain)))
    last: Any = plain[-1]
    assert last.response.output_text == text
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_a_parsed_answer(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "input": ASK, "text_format": Weather, "max_output_tokens": 300}
    answer = client.responses.parse(**body, temperature=0)
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(**body, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == answer.output_parsed


def test_a_call_and_its_result(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "tools": [TOOL], "max_output_tokens": 300, "temperature": 0}
    first = client.responses.create(
        **body, input=ASK, tool_choice={"type": "function", "name": "get_weather"}
    )
    (call,) = (item for item in first.output if item.type == "function_call")
    assert call.name == "get_weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    stored = client.responses.create(
        **body, input=[result], previous_response_id=first.id, tool_choice="none"
    )
    # The same without the server's memory: the items go back as they came.
    items: Any = [{"role": "user", "content": ASK}, *(item.model_dump() for item in first.output), result]
    sent = client.responses.create(**body, input=items, store=False, tool_choice="none")
    assert stored.output_text == sent.output_text
    assert stored.usage is not None and sent.usage is not None
    assert stored.usage.input_tokens == sent.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(sent.id)


def test_a_streamed_call(client: OpenAI) -> None:
    with client.responses.stream(
        model="m", input=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        arguments = [e.arguments for e in stream if e.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    (call,) = (item for item in final.output if item.type == "function_call")
    assert [call.arguments] == arguments and "city" in call.arguments


def test_what_is_stored(client: OpenAI) -> None:
    made = client.responses.create(model="m", input=ASK, max_output_tokens=5, metadata={"job": "1"})
    again = client.responses.retrieve(made.id)
    assert again.output_text == made.output_text and again.metadata == {"job": "1"}
    (item,) = client.responses.input_items.list(made.id)
    assert item.type == "message"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_background(client: OpenAI) -> None:
    begun = client.responses.create(model="m", input=ASK, background=True, extra_body={"ignore_eos": True})
    assert begun.status == "in_progress"
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    short = client.responses.create(model="m", input=ASK, background=True, max_output_tokens=3)
    while client.responses.retrieve(short.id).status == "in_progress":
        pass  # a response that never ends ends in the test's timeout
    assert client.responses.retrieve(short.id).status in ("incomplete", "completed")


def test_faults_are_the_clients_own_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="m", input="a", tools=[{"type": "web_search"}])
    assert bad.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="a")
