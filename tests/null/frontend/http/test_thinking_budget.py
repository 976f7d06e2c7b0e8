"""`thinking_token_budget` and `enable_thinking`: drawn thoughts end in time, on every route."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from pegainfer.app.grammars import LLGuidanceGrammars
from pegainfer.contract.request import unpack_tokens
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.null.model import NullModel
from tests.support.asgi import TEMPLATE, client
from tests.support.fake_engine import FakeEngine
from tests.support.null_engine import null_engine
from tests.support.scripted import LONG
from tests.support.thinking import END, LEAVES, OPENS, START, VOCAB_SIZE, thinking_tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "?"}
TOKENIZER = thinking_tokenizer()
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
INFO = msgspec.structs.replace(LONG, vocab_size=VOCAB_SIZE)
DRAWN = {"messages": [USER], "max_tokens": 60, "n": 4, "return_token_ids": True, "ignore_eos": True}


@dataclass(frozen=True, kw_only=True)
class Blind(NullModel):
    """Draws any token that it may."""

    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class Tireless(Blind):
    """Begins to think where it may, and goes on as long as it may."""

    def draw(self, *args: Any) -> int:
        *others, mask = args
        if mask is not None:
            bits = bytearray(mask)
            if bits[START >> 3] >> (START & 7) & 1:
                return START
            bits[END >> 3] &= ~(1 << (END & 7)) & 0xFF
            mask = bytes(bits) if any(bits) else mask
        return super().draw(*others, mask)


def answers(
    *bodies: dict[str, Any], path: str = CHAT, template: ChatTemplate = OPENS, model: NullModel | None = None
) -> list[Any]:
    """Of requests to the null engine."""
    model = model or Blind()
    grammars = LLGuidanceGrammars(lambda: vocabulary_of(TOKENIZER), VOCAB_SIZE)

    async def main() -> list[Any]:
        out = []
        with null_engine(grammars=grammars, model=model) as engine:
            app = create_app(engine, TOKENIZER, template, HttpConfig())
            try:
                async with client(app) as http:
                    for body in bodies:
                        found = await http.post(path, json=body)
                        assert found.status_code == 200, found.text
                        out.append(found.json())
            finally:
                app.front.workers.close()
        return out

    return asyncio.run(asyncio.wait_for(main(), 110))


def scripted_app(template: ChatTemplate = OPENS) -> tuple[App, FakeEngine]:
    engine = FakeEngine(info=INFO)
    return create_app(engine, TOKENIZER, template, HttpConfig()), engine


def send(
    body: dict[str, Any], path: str = CHAT, template: ChatTemplate = OPENS
) -> tuple[int, Any, FakeEngine]:
    """(status, answer, engine) of a request to a scripted engine."""
    app, engine = scripted_app(template)

    async def main() -> tuple[int, Any]:
        try:
            async with client(app) as http:
                found = await http.post(path, json=body)
                return found.status_code, found.json()
        finally:
            app.front.workers.close()

    return *asyncio.run(asyncio.wait_for(main(), 110)), engine


@pytest.mark.parametrize("budget", [0, 1, 20])
def test_the_end_of_the_thoughts_is_forced_after_so_many_tokens(budget: int) -> None:
    bodies = [{**DRAWN, "thinking_token_budget": budget, "seed": seed} for seed in range(6)]
    places = []
    for answer in answers(*bodies):
        for choice in answer["choices"]:
            places.append(choice["token_ids"].index(END))
            assert len(choice["token_ids"]) == 60
            assert choice["message"]["content"]
            assert budget or "reasoning_content" not in choice["message"]
    assert max(places) == budget
    assert budget < 20 or min(places) < budget  # a model may end its thoughts earlier


def test_a_model_that_begins_its_thoughts_itself_is_bounded_too() -> None:
    body = {**DRAWN, "thinking_budget": 5}
    (answer,) = answers(body, template=LEAVES, model=Tireless())
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        assert ids[0] == START and ids.index(END) == 6
        assert choice["message"]["reasoning_content"] and choice["message"]["content"]
    (answer,) = answers({**body, "stop_token_ids": [START]}, template=LEAVES)
    for choice in answer["choices"]:  # it need not think
        assert "reasoning_content" not in choice["message"] and choice["message"]["content"]


def test_calls_and_formats_hold_after_bounded_thoughts() -> None:
    tools = {"tools": [{"type": "function", "function": NOW}], "tool_choice": "required"}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    base = {
        **DRAWN,
        "ignore_eos": False,
        "max_tokens": 400,
        "thinking_token_budget": 9,
        "parallel_tool_calls": False,
    }
    called, formed = answers({**base, **tools}, {**base, **form})
    for choice in called["choices"]:
        assert choice["token_ids"].index(END) <= 9
        assert choice["finish_reason"] == "tool_calls"
        assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["now"]
    for choice in formed["choices"]:
        assert choice["token_ids"].index(END) <= 9
        assert json.loads(choice["message"]["content"]).keys() == {"a"}


def test_the_budget_of_the_other_routes() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"messages": [USER], "max_tokens": 1100, "thinking": thinking, "ignore_eos": True, "seed": 1}
    (message,) = answers(body, path="/v1/messages", model=Tireless())
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 1025
    for more in ({"thinking_budget": 7}, {"chat_template_kwargs": {"thinking_token_budget": 7}}):
        asked = {"input": "?", "max_output_tokens": 50, "ignore_eos": True, **more}
        (response,) = answers(asked, path="/v1/responses", model=Tireless())
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 8
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"thinking_token_budget": None},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 50, "max_tokens": 50},
        {"thinking_token_budget": 50, "enable_thinking": False},
        {"thinking_budget": 10_000},
        {"chat_template_kwargs": {"thinking_budget": -1}},
    ],
)
def test_a_budget_that_asks_for_nothing_costs_no_grammar(fields: dict[str, Any]) -> None:
    status, answer, engine = send({"messages": [USER], **fields})
    assert status == 200, answer
    assert engine.requests[-1].grammar is None


def test_a_budget_on_a_model_that_does_not_think_is_accepted() -> None:
    fields = {
        "thinking_token_budget": 5,
        "enable_thinking": False,
        "chat_template_kwargs": {"thinking_budget": 5},
    }
    status, answer, engine = send({"messages": [USER], **fields}, template=TEMPLATE)
    assert status == 200, answer
    assert engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "thinking_budget": 6}, "thinking_budget"),
        ({"chat_template_kwargs": {"thinking_budget": "5"}}, "chat_template_kwargs.thinking_budget"),
        ({"chat_template_kwargs": {"thinking_budget": True}}, "chat_template_kwargs.thinking_budget"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "enable_thinking"),
    ],
)
def test_budgets_that_are_refused(fields: dict[str, Any], param: str) -> None:
    status, answer, engine = send({"messages": [USER], **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not engine.requests


def test_completions_know_no_thoughts() -> None:
    status, answer, _ = send({"prompt": "x", "thinking_token_budget": 5}, path="/v1/completions")
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False, "reasoning_effort": "none"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
def test_thinking_is_switched_off_by_a_field_or_a_variable(fields: dict[str, Any], path: str) -> None:
    body: dict[str, Any] = {"messages": [USER], **fields}
    if path == "/v1/responses":
        effort = body.pop("reasoning_effort", None)
        body = {**body, "input": "?", "reasoning": {"effort": effort}}
        del body["messages"]
    status, answer, engine = send(body, path)
    assert status == 200, answer
    ids = answer["tokens"] if path == "/tokenize" else unpack_tokens(engine.requests[-1].prompt)
    assert ids[-2:] == [START, END]
