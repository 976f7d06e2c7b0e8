"""Requests that broke real servers, on the whole engine over the null device.

After each one the server is healthy, answers a normal request, and nothing is left running or waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.frontend.http.app import App
from pegainfer.null.model import NullModel
from tests.support.asgi import Call, client, events, make_app, run, stream_text
from tests.support.null_engine import null_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
DEFAULTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER]},
}


def alphabet(tokens: Sequence[int], num_prompt: int, seed: int) -> int:
    """The letter after the last one; 'Z' is followed by EOS."""
    return 257 if tokens[-1] == ord("Z") else tokens[-1] + 1


async def settle(engine: InProcessEngine) -> None:
    """Waits until the engine says that nothing runs or waits."""
    while (stats := engine.stats()).running or stats.waiting or stats.in_flight:
        await asyncio.sleep(0.001)


async def assert_sound(app: App, engine: InProcessEngine, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    answer = await http.post(
        COMPLETIONS, json={"prompt": "a normal request", "max_tokens": 4, "ignore_eos": True}
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    await settle(engine)
    load = (await http.get("/load")).json()
    assert (load["server_load"], load["running"], load["waiting"]) == (0, 0, 0)
    assert load["queued_requests"] == load["queued_tokens"] == 0
    assert load["free_blocks"] == load["total_blocks"]


@contextlib.asynccontextmanager
async def server(**null: Any) -> AsyncIterator[tuple[App, InProcessEngine, httpx.AsyncClient]]:
    """An app on a fresh engine; judged sound at the end."""
    with null_engine(**null) as engine:
        app = make_app(engine)  # type: ignore[arg-type]
        async with client(app) as http:
            yield app, engine, http
            await assert_sound(app, engine, http)


FUNCTION = {"name": "f"}
TOOL = {"type": "function", "function": FUNCTION}
BAD = {"type": "object", "properties": {"a": {"type": "not-a-type"}}, "required": ["a"]}
LIST = {"name": "f", "arguments": "[1]"}
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
CALL = {"name": "f", "arguments": "{"}
SCHEMA = "response_format.json_schema.schema"


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


# The words by which clients know a prompt that does not fit.
TOO_LONG = ("This model's maximum context length is 4096 tokens", "prompt is too long: ")

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # 1, 2: what constrains the output
    (CHAT, {"response_format": schema({"type": "not-a-type"})}, SCHEMA),
    (CHAT, {"response_format": schema({"$ref": "#"})}, SCHEMA),
    (CHAT, {"response_format": schema({"$ref": "#/$defs/none"})}, SCHEMA),
    (CHAT, {"response_format": schema({"not": {"type": "string"}})}, SCHEMA),
    (CHAT, {"response_format": schema({"x-guidance": {"lenient": True}})}, SCHEMA + ".x-guidance"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA),
    (CHAT, {"response_format": {"type": "json_schema"}}, SCHEMA),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {}}, "response_format.type"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    (CHAT, {"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    (CHAT, {"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (CHAT, {"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
    (CHAT, {"structured_outputs": {"structural_tag": {"triggers": []}}}, "structured_outputs.structural_tag"),
    (COMPLETIONS, {"structured_outputs": {"json": ""}}, "structured_outputs.json"),
    (COMPLETIONS, {"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
    (COMPLETIONS, {"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex"),
    (COMPLETIONS, {"suffix": "end"}, "suffix"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "not-a-type"}}}},
     "text.format.schema"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#"}}}},
     "text.format.schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "not-a-type"}}}},
     "output_config.format.schema"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}},
     "output_config.format.schema"),
    (COMPLETIONS, {"response_format": schema({"type": "not-a-type"})}, SCHEMA),
    (COMPLETIONS, {"response_format": schema({"$ref": "#"})}, SCHEMA),
    (COMPLETIONS, {"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    # 3
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    # 5
    (COMPLETIONS, {"logit_bias": {"99999999": 5}}, "logit_bias"),
    (CHAT, {"logit_bias": {"99999999": 5}}, "logit_bias"),
    (MESSAGES, {"logit_bias": {"99999999": 5}}, "logit_bias"),
    (RESPONSES, {"logit_bias": {"99999999": 5}}, "logit_bias"),
    (COMPLETIONS, {"stop_token_ids": [99999999]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
    (CHAT, {"logit_bias": {"258": 5}}, "logit_bias"),
    (CHAT, {"stop_token_ids": [99999999]}, "stop_token_ids[0]"),
    (CHAT, {"allowed_token_ids": list(range(2000))}, "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [1, 258]}, "allowed_token_ids[1]"),
    (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    # 6
    ("/tokenize", {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}]}, ARGUMENTS),
    ("/apply_template", {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}]},
     ARGUMENTS),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
     "input[0].arguments"),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "f", "input": "{"}]}]}, "messages[1].content[0].input"),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": CALL}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (CHAT, {"messages": [{"role": "assistant", "function_call": CALL}]}, "messages[0].function_call"),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": LIST}]}]}, ARGUMENTS),
    (CHAT, {"messages": [{"role": "function", "content": "1", "name": "f"}]}, "messages[0].role"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].function"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": BAD}}],
            "tool_choice": "required"}, "tools[0].function.parameters"),
    # 8
    ("/tokenize", {"messages": []}, "messages"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [258]}, "tokens[0]"),
    ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
    ("/apply_template", {"messages": []}, "messages"),
    ("/apply_template", {"messages": None}, "messages"),
    (COUNT, {"messages": []}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (MESSAGES, {"messages": []}, "messages"),
    (RESPONSES, {"input": []}, "input"),
    (EMBEDDINGS, {"input": []}, "input"),
    (EMBEDDINGS, {"input": ""}, "input"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    *((path, {field: tokens}, where) for path, field in ((COMPLETIONS, "prompt"), (EMBEDDINGS, "input"))
      for tokens, where in (
          ([-1], f"{field}[0]"), ([1, 258], f"{field}[1]"), ([[1], [2**63]], f"{field}[1][0]"),
          ([[]], field), ([1, "a"], field), ([["a"]], f"{field}[0][0]"), ([True], f"{field}[0]"),
      )),
    # 10
    (MESSAGES, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    (RESPONSES, {"input": "x" * 5000}, "input"),
    (EMBEDDINGS, {"input": "x" * 5000}, "input"),
    (EMBEDDINGS, {"input": ["a", [1] * 4096]}, "input"),
    (COMPLETIONS, {"prompt": "x" * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 4096}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_each_is_refused_twice_alike_by_the_name_of_the_field(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            answers = [await http.post(path, json={**DEFAULTS.get(path, {}), **fields}) for _ in range(2)]
            for answer in answers:
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error.get("param", param) == param  # Anthropic's shape has none
                assert error["message"].startswith((param, *TOO_LONG))
            assert answers[0].content == answers[1].content

    run(main)


def test_an_over_long_prompt_tells_both_lengths() -> None:
    async def main() -> None:
        async with server(max_model_len=64) as (_, _engine, http):
            for prompt, got in (("x" * 64, "64"), ("x" * 1000, "at least 1000 in 1000 characters")):
                answer = await http.post(COMPLETIONS, json={"prompt": prompt})
                assert answer.status_code == 400
                message = answer.json()["error"]["message"]
                assert "63 tokens" in message
                assert f"got {got};" in message
            fits = await http.post(COMPLETIONS, json={"prompt": "x" * 63, "ignore_eos": True})
            assert fits.json()["usage"]["completion_tokens"] == 1

    run(main)


@pytest.mark.parametrize("path", DEFAULTS)
@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_can_be_off(top_k: int, path: str) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"

    async def main() -> None:
        async with server() as (_, _engine, http):
            body = {**DEFAULTS[path], "top_k": top_k, "temperature": 1.0, limit: 2, "ignore_eos": True}
            assert (await http.post(path, json=body)).status_code == 200

    run(main)


def test_allowed_tokens_of_the_vocabulary_are_served() -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            body = {
                "prompt": "a",
                "allowed_token_ids": list(range(97, 123)),
                "max_tokens": 20,
                "ignore_eos": True,
            }
            text = (await http.post(COMPLETIONS, json=body)).json()["choices"][0]["text"]
            assert len(text) == 20
            assert text.isalpha()
            assert text.islower()

    run(main)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("stop", "text", "finish"),
    [
        (["DEFGHIJ"], "", "stop"),
        (["FGH"], "DE", "stop"),
        (["FGX", "HIJ"], "DEFG", "stop"),
        (["DEFGHIX"], "DEFGHIJKLMNOPQRSTUVWXYZ", "stop"),  # a false beginning; EOS ends it
        (["XYZ!"], "DEFGHIJKLMNOPQRSTUVWXYZ", "stop"),  # held at the very end
    ],
)
def test_stop_strings_are_never_shown_in_part(stream: bool, stop: list[str], text: str, finish: str) -> None:
    async def main() -> None:
        async with server(model=NullModel(next_token=alphabet)) as (_, _engine, http):
            body = {
                "prompt": "Here is the English alphabet: ABC",
                "temperature": 0,
                "stop": stop,
                "stream": stream,
                "stream_options": {"include_usage": True} if stream else None,
            }
            answer = await http.post(COMPLETIONS, json=body)
            if stream:
                *chunks, last, done = events(answer.text)
                assert done == "[DONE]"
                assert stream_text(chunks) == text
                assert chunks[-1]["choices"][0]["finish_reason"] == finish
                assert all(
                    not any(s in stream_text(chunks[: i + 1]) for s in stop) for i in range(len(chunks))
                )
                assert last["choices"] == []
                usage = last["usage"]
            else:
                choice = answer.json()["choices"][0]
                assert (choice["text"], choice["finish_reason"]) == (text, finish)
                usage = answer.json()["usage"]
            matched = next((s for s in stop if s in "DEFGHIJKLMNOPQRSTUVWXYZ"), None)
            assert usage["completion_tokens"] == (24 if matched is None else len(text) + len(matched))

    run(main)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_in_a_stream_only_on_request(path: str) -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
            body |= {"stream": True, "max_tokens": 5, "ignore_eos": True}
            plain = events((await http.post(path, json=body)).text)
            assert all("usage" not in c and c["choices"] for c in plain[:-1])
            asked = events(
                (await http.post(path, json={**body, "stream_options": {"include_usage": True}})).text
            )
            assert asked[-1] == "[DONE]"
            assert asked[-2]["choices"] == []
            assert asked[-2]["usage"]["completion_tokens"] == 5

    run(main)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_two_hundred_disconnects_in_a_row(path: str) -> None:
    async def main() -> None:
        async with server(step_seconds=0.0005) as (app, engine, _):
            before = engine.stats()
            body: dict[str, Any] = {"prompt": "abc"} if path == COMPLETIONS else {"messages": [USER]}
            body |= {"stream": True, "ignore_eos": True, "max_tokens": 3000}
            for _ in range(200):
                call = Call(app, path, body)
                await call.until(lambda call=call: bool(call.writes))  # type: ignore[misc]
                call.disconnect()
                await call.task
            await settle(engine)
            after = engine.stats()
            assert after.running == after.waiting == 0
            assert after.free_blocks == before.free_blocks
            assert after.finished["abort"] == 200

    run(main)


def test_a_disconnect_is_seen_within_a_step_or_two() -> None:
    async def main() -> None:
        async with server(step_seconds=0.002) as (app, engine, _):
            call = Call(
                app, COMPLETIONS, {"prompt": "abc", "stream": True, "ignore_eos": True, "max_tokens": 3000}
            )
            await call.until(lambda: bool(call.writes))
            call.disconnect()
            await call.task
            steps = engine.stats().steps
            await settle(engine)
            # The snapshot may lag by 50 ms; two plans were in flight when the word came.
            assert engine.stats().steps - steps <= 50 / 2 + 4

    run(main)


def test_deadlines_that_pass_in_the_queue_are_a_504() -> None:
    async def main() -> None:
        async with server(step_seconds=0.005, max_slots=1) as (app, _engine, http):
            long = Call(app, COMPLETIONS, {"prompt": "abc", "ignore_eos": True, "max_tokens": 3000})
            late = await http.post(COMPLETIONS, json={"prompt": "b", "timeout": 0.02})
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "timeout"
            long.disconnect()
            await long.task

    run(main)


def test_the_prefix_cache_is_told_in_usage_and_salts_part_it() -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            body = {"prompt": "x" * 40, "max_tokens": 1}
            cached = []
            for salt in (None, None, "other", "other"):
                answer = (await http.post(COMPLETIONS, json={**body, "cache_salt": salt})).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 32, 0, 32]

    run(main)


def test_prompt_logprobs_and_scoring_on_the_engine() -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            body = {"prompt": ["abc", "q"], "echo": True, "logprobs": 1, "max_tokens": 0}
            answer = (await http.post(COMPLETIONS, json=body)).json()
            assert [c["text"] for c in answer["choices"]] == ["abc", "q"]
            assert [len(c["logprobs"]["tokens"]) for c in answer["choices"]] == [3, 1]
            assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
            assert answer["usage"]["completion_tokens"] == 0
            both = (await http.post(COMPLETIONS, json={**body, "max_tokens": 2, "ignore_eos": True})).json()
            assert [len(c["logprobs"]["tokens"]) for c in both["choices"]] == [5, 3]

    run(main)


def test_seeds_repeat_and_n_differ() -> None:
    async def main() -> None:
        async with server() as (_, _engine, http):
            body = {
                "prompt": "abc",
                "temperature": 1.0,
                "seed": 7,
                "n": 3,
                "max_tokens": 20,
                "ignore_eos": True,
            }
            first = (await http.post(COMPLETIONS, json=body)).json()["choices"]
            again = (await http.post(COMPLETIONS, json=body)).json()["choices"]
            assert first == again
            assert len({c["text"] for c in first}) == 3

    run(main)
