"""POST /v1/messages: what it takes, what the model reads of it, and what comes back, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.tools.call import read_object
from tests.support.asgi import TOKENIZER, Call, make_app, named_events, run, spin
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import app_of, ask_app, prompt_of, scripted

PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


def send(text: str = "hello", *, thinks: bool = False, **fields: Any) -> tuple[dict[str, Any], FakeEngine]:
    """The answer; streamed, it must be the same."""
    body = {"messages": [USER], "max_tokens": 500, **fields}
    engine = scripted(text)
    whole = ask_app(app_of(engine, thinks=thinks), PATH, body)
    assert whole.status_code == 200, whole.text
    streamed = ask_app(app_of(scripted(text), thinks=thinks), PATH, {**body, "stream": True})
    answer: dict[str, Any] = whole.json()
    again = joined(named_events(streamed.text))
    assert without_ids(again) == without_ids(answer)
    return answer, engine


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: v for name, v in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content}


def joined(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """A stream's events put together as a client does it; their order is checked."""
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0][1]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    partial = ""
    open_index = None
    for name, data in events[1:-2]:
        if name == "content_block_start":
            assert open_index is None and data["index"] == len(message["content"])
            open_index, partial = data["index"], ""
            message["content"].append(data["content_block"])
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = read_object(partial) or {}  # {} where it was cut off
        else:
            assert name == "content_block_delta" and data["index"] == open_index
            block, delta = message["content"][-1], data["delta"]
            match delta["type"]:
                case "text_delta":
                    block["text"] += delta["text"]
                case "thinking_delta":
                    block["thinking"] += delta["thinking"]
                case "signature_delta":
                    block["signature"] = delta["signature"]
                case "input_json_delta":
                    partial += delta["partial_json"]
    assert open_index is None
    last = events[-2][1]
    message.update(last["delta"])
    message["usage"] = last["usage"]
    return message


def refuse(**fields: Any) -> str:
    engine = scripted("x")
    response = ask_app(app_of(engine), PATH, {"messages": [USER], "max_tokens": 50, **fields})
    assert response.status_code == 400, response.text
    assert not engine.requests
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    message: str = body["error"]["message"]
    return message


def test_an_answer_has_anthropics_shape() -> None:
    answer, engine = send("hello", system="be brief")
    assert answer["id"].startswith("msg_")
    assert {name: answer[name] for name in ("type", "role", "model", "content", "stop_reason")} == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
    }
    usage = answer["usage"]
    assert prompt_of(engine) == "system:be brief\nuser:hi\n"
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("system:be brief\nuser:hi\n")
    assert usage["cache_read_input_tokens"] == 16 and usage["output_tokens"] == 6


def test_the_reasons_to_stop() -> None:
    assert send("hello", max_tokens=3)[0]["stop_reason"] == "max_tokens"
    stopped = send("hello you", stop_sequences=["you", "lo"])[0]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
    assert stopped["content"][0]["text"] == "hel"
    full = ask_app(make_app(FakeEngine()), PATH, {"messages": [USER]}).json()
    assert full["stop_reason"] == "model_context_window_exceeded"


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    text = (
        'so\n</think>\n\nLet me see. <tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
    )
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer, engine = send(text, thinks=True, tools=[TOOL], thinking=thinking, max_tokens=2000)
    thought, said, made = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "so")
    assert len(thought["signature"]) == 64
    assert (said["type"], said["text"]) == ("text", "Let me see.")
    assert (made["type"], made["name"], made["input"]) == ("tool_use", "now", {"zone": "é"})
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("so\n</think>")}
    assert prompt_of(engine) == "user:hi\ntool:now\n<think>"


def test_thinking_is_switched() -> None:
    for thinking, end in (({"type": "disabled"}, "<think></think>"), ({"type": "adaptive"}, "\n<think>")):
        _, engine = send("x</think>y", thinks=True, thinking=thinking)
        assert prompt_of(engine).endswith(end)
    _, engine = send("x", thinks=True, chat_template_kwargs={"enable_thinking": True})
    assert prompt_of(engine).endswith("\n<think>")
    # Only who asks for thoughts has them: models that can do without are told so.
    engine = scripted("x")
    template = ChatTemplate("{{ messages[0].content }} {{ enable_thinking }}{# </think> #}", {})
    ask_app(create_app(engine, TOKENIZER, template, HttpConfig()), PATH, {"messages": [USER]})
    assert prompt_of(engine).endswith(" False")
    # A model that never thinks stays below every budget.
    send("x", thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)


def test_thoughts_that_are_not_shown_come_back_in_their_signature() -> None:
    answer, _ = send("so</think>y", thinks=True, thinking={"type": "adaptive", "display": "omitted"})
    hidden = answer["content"][0]
    assert hidden["thinking"] == "" and "so" not in hidden["signature"]
    _, engine = send("x", messages=[USER, {"role": "assistant", "content": answer["content"]}, USER])
    assert prompt_of(engine) == "user:hi\nassistant:y|thought:so\nuser:hi\n"


def test_a_call_that_the_limit_cuts_off() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {"zone": "Eur'
    body = {"messages": [USER], "tools": [TOOL], "max_tokens": len(text)}
    whole = ask_app(app_of(scripted(text + "ope")), PATH, body).json()
    assert whole["stop_reason"] == "max_tokens"
    assert [b["type"] for b in whole["content"]] == ["tool_use"]
    assert whole["content"][0]["input"] == {}


def test_a_conversation_with_results_reaches_the_template() -> None:
    _, engine = send(
        "ok",
        tools=[TOOL],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
            {"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            {"type": "text", "text": "two"},
        ],
        messages=[
            USER,
            {"role": "user", "content": [{"type": "text", "text": "again"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "12:00"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no clock"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    )
    assert prompt_of(engine) == (
        "system:one\ntwo\nuser:hi\nagain\n"
        'assistant:wait|thought:hm|call:t1:now{"a": 1}|call:t2:now{}\n'
        "tool:12:00|of:t1\ntool:Error: no clock|of:t2\nuser:and?\ntool:now\n"
    )


def test_an_answer_that_has_begun_is_gone_on_with() -> None:
    _, engine = send("x", messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert prompt_of(engine) == "user:hi\nassistant:The answer is"


@pytest.mark.parametrize(
    ("choice", "grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "now"}, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True),
    ],
)
def test_tool_choice(choice: dict[str, Any], grammar: bool) -> None:
    _, engine = send("x", tools=[TOOL], tool_choice=choice)
    assert (engine.requests[0].grammar is not None) is grammar


def test_no_tools_by_choice() -> None:
    _, engine = send("x", tools=[TOOL], tool_choice={"type": "none"})
    assert prompt_of(engine) == "user:hi\n"


def test_an_output_that_obeys_a_schema() -> None:
    _, engine = send("{}", output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert engine.requests[0].grammar is not None


def test_sampling_reaches_the_engine() -> None:
    _, engine = send("x", temperature=0.5, top_k=7, top_p=0.9, seed=3, metadata={"user_id": "me"})
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 7, 0.9, 3)


def turn(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: "),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type: "),
        (turn("user", type="tool_use", id="a", name="b", input={}), "messages[0].content[0].type: "),
        (turn("assistant", type="tool_use", id="a", input={}), "messages[0].content[0].name: "),
        (
            turn("user", type="tool_result", tool_use_id="a", content=[IMAGE]),
            "messages[0].content[0].content[0].type: ",
        ),
        (turn("user", type="text", text="a", x=1), "messages[0].content[0].x: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"temperature": -1}, "temperature: "),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: "),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: "),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema: "),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema: "),
        ({"tools": [TOOL, TOOL]}, "tools: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "all"}}, "tool_choice.type: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"thinking": {"type": "on"}}, "thinking.type: "),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens: "),
        ({"output_config": {"effort": "loud"}}, "output_config.effort: "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config."),
        ({"system": [{"type": "image", "text": ""}]}, "system[0].type: "),
        ({"container": "c"}, "container: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management: "),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading: "),
        ({"inference_geo": "us"}, "inference_geo: "),
        ({"n": 2}, "n: "),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m", "x": 1}}, "cache_control.x: "),
    ],
)  # fmt: skip
def test_faults_are_named_as_the_route_calls_them(fields: dict[str, Any], start: str) -> None:
    assert refuse(**fields).startswith(start)


def test_a_request_as_coding_agents_send_it() -> None:
    cached = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    _, engine = send(
        "ok",
        thinks=True,
        max_tokens=64000,
        temperature=1,
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": '{"device_id":"1","session_id":"2"}'},
        system=[{"type": "text", "text": "You are an agent.", "cache_control": cached}],
        tools=[{**TOOL, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": cached}]}],
    )
    assert prompt_of(engine) == "system:You are an agent.\nuser:hi\ntool:now\n<think>"


def test_levels_of_effort_where_the_template_knows_them() -> None:
    template = ChatTemplate("{{ messages[0].content }}:{{ reasoning_effort }}", {})
    engine = scripted("x")
    app = create_app(engine, TOKENIZER, template, HttpConfig())
    body = {"messages": [USER], "output_config": {"effort": "low"}}
    assert ask_app(app, PATH, body).status_code == 200
    assert prompt_of(engine) == "hi:low"


def test_an_over_long_prompt_tells_both_lengths() -> None:
    message = refuse(messages=[{"role": "user", "content": "x" * 9000}])
    assert message == "prompt is too long: 9006 tokens > 8191 maximum"


@pytest.mark.parametrize(
    ("version", "status"), [("2023-06-01", 200), ("2026-10-21", 200), ("2031-01-01", 400), ("", 400)]
)
def test_the_versions_header(version: str, status: int) -> None:
    app = app_of(scripted("x"))
    response = ask_app(app, PATH, {"messages": [USER]}, **{"anthropic-version": version})
    assert response.status_code == status


def test_errors_of_every_door_have_anthropics_shape() -> None:
    app = app_of(scripted("x"), api_key=("secret",), max_body_bytes=100)
    shut = ask_app(app, PATH, {"messages": [USER]}, **{"x-api-key": "other"})
    assert shut.status_code == 401 and shut.json()["error"]["type"] == "authentication_error"
    opened = ask_app(app, PATH, {"messages": [USER]}, **{"x-api-key": "secret"})
    assert opened.status_code == 200
    large = ask_app(app, PATH, {"messages": ["x" * 200]}, **{"x-api-key": "secret"})
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"
    missing = ask_app(app, PATH, {"messages": [USER], "model": "x"}, authorization="Bearer secret")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    wrong = ask_app(app, PATH, method="PUT", authorization="Bearer secret")
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"


def test_tokens_are_counted_as_they_are_served() -> None:
    body = {"messages": [USER], "system": "be brief", "tools": [TOOL]}
    engine = scripted("x")
    app = app_of(engine)
    ask_app(app, PATH, body)
    count = ask_app(app, PATH + "/count_tokens", body)
    assert count.json() == {"input_tokens": len(prompt_of(engine))}
    assert ask_app(app, PATH + "/count_tokens", {**body, "max_tokens": 5}).status_code == 400


def test_a_failing_stream_ends_with_an_error_event_and_silence_with_pings() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        call = Call(app, PATH, {"messages": [USER], "stream": True})
        await spin()
        live = next(iter(app.front.registry.live.values()))
        live.poke(live._written + 1, 1)
        await call.until(lambda: bool(call.body))
        assert call.body == b": keep-alive\n\n"
        engine.step()
        await call.until(lambda: b"text_delta" in call.body)
        live.poke(live._written + 1, 1)
        await call.until(lambda: b"ping" in call.body)
        engine.die()
        await call.task
        name, data = named_events(call.body)[-1]
        assert name == "error"
        assert data == {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "the engine process has ended"},
        }
        assert app.num_live == 0

    run(main)


def test_an_aborted_answer_has_no_reason_to_stop() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        call = Call(app, PATH, {"messages": [USER], "request_id": "job"})
        await spin()
        engine.step()
        abort = Call(app, "/v1/abort", {"request_id": "msg_job"})
        await abort.task
        assert abort.status == 200
        await call.task
        answer = json.loads(call.body)
        assert (answer["id"], answer["stop_reason"]) == ("msg_job", None)
        assert answer["content"][0]["text"] == "h"

    run(main)
