"""Any JSON at the routes that agents use: a whole answer or a 4xx with a reason, never a 500."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.http.anthropic.request import MessagesRequest, PromptFields
from pegainfer.frontend.http.responses_api.request import ResponsesRequest
from tests.null.frontend.http.test_fuzz import LIKELY, bodies, relaxed, scalars, texts, values, words
from tests.support.asgi import client, make_app, named_events
from tests.support.null_engine import null_engine

roles = st.sampled_from(["user", "assistant", "system", "developer", "tool"])
names = st.sampled_from(["now", "f", "a b", ""])
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "input_image", "text"])}, optional={"text": texts}
)
objects = st.dictionaries(texts, scalars, max_size=2)
items = (
    st.fixed_dictionaries({"role": roles, "content": texts | st.lists(parts, max_size=2)})
    | st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": texts,
            "name": names,
            "arguments": objects.map(json.dumps) | texts,
        }
    )
    | st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": texts, "output": texts})
    | st.fixed_dictionaries({"type": st.just("reasoning"), "encrypted_content": texts | st.none()})
    | st.fixed_dictionaries({"type": texts})
)
said = st.fixed_dictionaries({"type": st.just("text"), "text": texts})
thought = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts, "signature": texts})
called = st.fixed_dictionaries({"type": st.just("tool_use"), "id": words, "name": words, "input": objects})
result = st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": words, "content": texts})


def turns(role: str, *blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    content = texts | st.lists(st.one_of(blocks), min_size=1, max_size=3)
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


any_turn = turns("user", said, result) | turns("assistant", said, thought, called)
odd_turn = st.fixed_dictionaries({"role": roles, "content": st.lists(said | thought | called | result)})
schemas = st.fixed_dictionaries({"type": st.sampled_from(["object", "object", "array"])})
function = {"name": names, "description": texts}
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), **function}, optional={"parameters": schemas})
    | st.fixed_dictionaries({**function, "input_schema": schemas}),
    max_size=2,
)
choices = (
    st.sampled_from(["none", "auto", "required", "any"])
    | st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none", "function"])})
    | st.fixed_dictionaries({"type": st.sampled_from(["tool", "function"]), "name": names})
)
AGENTS: dict[str, st.SearchStrategy[Any]] = {
    "input": words | st.lists(items, max_size=4),
    "messages": st.lists(any_turn | any_turn | odd_turn, min_size=1, max_size=3),
    "instructions": texts,
    "system": texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2),
    "max_output_tokens": st.integers(0, 5),
    "max_tokens": st.integers(0, 5),
    "stop_sequences": st.lists(words, max_size=3),
    "tools": tools,
    "tool_choice": choices,
    "include": st.lists(st.sampled_from(["message.output_text.logprobs", "reasoning.encrypted_content"])),
    "metadata": st.dictionaries(texts, texts, max_size=2) | st.fixed_dictionaries({"user_id": texts}),
    "truncation": st.sampled_from(["auto", "disabled"]),
    "background": st.just(False),
    "previous_response_id": texts,
    "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "low", None])}),
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["disabled", "adaptive"])}),
    "text": st.just({"format": {"type": "text"}}),
    "output_config": st.just({}),
    "stream_options": st.just({"include_obfuscation": False}),
    "cache_control": st.just({"type": "ephemeral"}),
    "safety_identifier": texts,
    "prompt_cache_key": texts,
}


def whole(path: str, answer: httpx.Response) -> Any:
    """The answer as a client has it in the end; a stream's last word for it."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    events = named_events(answer.text)
    if path == "/v1/responses":
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        return events[-1][1]["response"]
    assert events[0][0] == "message_start" and events[-1][0] == "message_stop"
    return {"usage": events[-2][1]["usage"], "stop_reason": events[-2][1]["delta"]["stop_reason"]}


async def post(http: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
    elif path == "/v1/responses":
        response = whole(path, answer)
        assert response["status"] in ("completed", "incomplete")
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    elif path == "/v1/messages":
        message = whole(path, answer)
        assert message["usage"]["output_tokens"] >= 1
        assert message["stop_reason"] is not None
    else:
        assert answer.json()["input_tokens"] >= 0


def run_all(path: str, batch: list[dict[str, Any]]) -> None:
    async def main() -> None:
        with null_engine(max_model_len=96) as engine:
            app = make_app(engine)  # type: ignore[arg-type]
            async with client(app) as http:
                await asyncio.gather(*(post(http, path, body) for body in batch))
                assert app.num_live == 0
                assert app.front.gate.waiting_requests == app.front.gate.waiting_tokens == 0
                assert (await http.get("/health")).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 60))


known = {**LIKELY, **AGENTS}


@relaxed
@given(st.lists(bodies(ResponsesRequest, "input", known), min_size=1, max_size=6))
def test_responses_take_any_json(batch: list[dict[str, Any]]) -> None:
    run_all("/v1/responses", batch)


@relaxed
@given(st.lists(bodies(MessagesRequest, "messages", known), min_size=1, max_size=6))
def test_messages_take_any_json(batch: list[dict[str, Any]]) -> None:
    run_all("/v1/messages", batch)


@relaxed
@given(st.lists(bodies(PromptFields, "messages", known), min_size=1, max_size=4))
def test_counting_takes_any_json(batch: list[dict[str, Any]]) -> None:
    run_all("/v1/messages/count_tokens", batch)


@relaxed
@given(st.lists(st.dictionaries(st.sampled_from(sorted(known)), values, max_size=4), min_size=1, max_size=4))
def test_values_of_any_kind(batch: list[dict[str, Any]]) -> None:
    for path in ("/v1/responses", "/v1/messages"):
        run_all(path, batch)
