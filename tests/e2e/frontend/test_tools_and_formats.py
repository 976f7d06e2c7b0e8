"""Tools and structured output through the official client, on the null device and on the default model."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.support.schemas import SCHEMAS

ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris, over the next 3 days?"}]


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=20)
    days: Literal[1, 3, 7]


TOOL: Any = openai.pydantic_function_tool(Weather, name="get_weather")
NOW: Any = {"type": "function", "function": {"name": "now", "description": "The time."}}


def test_a_parsed_answer(client: OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="m", messages=ASK, response_format=Weather, seed=seed, max_tokens=300
        )
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Weather) and parsed.days in (1, 3, 7)


def test_a_streamed_answer_is_parsed_alike(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "messages": ASK, "response_format": Weather, "seed": 4}
    whole = client.chat.completions.parse(**body, max_tokens=300)
    with client.chat.completions.stream(**body, max_tokens=300) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert final.choices[0].message.content == whole.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_is_asked_for(client: OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {
        "model": "m", "messages": ASK, "tools": [TOOL], "tool_choice": choice, "seed": 1, "max_tokens": 400,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.parse(**body).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.function.name == "get_weather"
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**body) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments


def test_a_conversation_with_results_goes_on(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "m", "tools": [TOOL, NOW], "max_tokens": 400, "seed": 2}
    first = client.chat.completions.create(**body, messages=ASK, tool_choice="required").choices[0].message
    assert first.tool_calls
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in first.tool_calls]
    second = client.chat.completions.create(**body, messages=[*ASK, first, *results], tool_choice="none")
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason in ("stop", "length")


def test_free_choice_with_a_strict_tool(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=ASK, tools=[TOOL], max_tokens=60, temperature=0
    ).choices[0]
    for call in answer.message.tool_calls or ():
        assert call.type == "function"
        Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("name", ["union", "recursion", "unicode keys", "pattern"])
def test_schemas_of_many_kinds(client: OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": f"An example of {name}, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}},
        max_tokens=1000,
        n=2,
        seed=3,
    )
    for choice in answer.choices:
        assert choice.message.content is not None
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMAS[name])
        else:
            assert choice.finish_reason == "length"


def test_vllms_fields(client: OpenAI) -> None:
    def ask(**fields: Any) -> str:
        answer = client.chat.completions.create(
            model="m", messages=ASK, max_tokens=60, extra_body={"structured_outputs": fields}
        )
        return answer.choices[0].message.content or ""

    assert ask(choice=["sunny", "rainy"]) in ("sunny", "rainy")
    assert len(ask(regex="[0-9]{4}")) == 4
    assert ask(grammar='root ::= "a" "b"') == "ab"


def test_a_bad_schema_is_the_clients_own_exception(client: OpenAI) -> None:
    for schema in ({"type": "not-a-type"}, {"$ref": "#"}):
        with pytest.raises(openai.BadRequestError, match="schema"):
            client.chat.completions.create(
                model="m",
                messages=ASK,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
    with pytest.raises(openai.BadRequestError) as caught:
        broken: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
        client.chat.completions.create(
            model="m", messages=[*ASK, {"role": "assistant", "tool_calls": [broken]}, *ASK]
        )
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
