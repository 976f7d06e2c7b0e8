"""POST /v1/responses: what it takes, what the model reads of it, and what comes back, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.asgi import Call, named_events, run, spin
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import app_of, ask_app, prompt_of, scripted

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "a", "name": "b", "arguments": "{}"}
FORMAT = {"type": "json_schema", "name": "a"}
# What differs from answer to answer.
OWN = ("id", "call_id", "created_at", "completed_at", "item_id")


def create(
    text: str = "hello", /, *, thinks: bool = False, **fields: Any
) -> tuple[dict[str, Any], FakeEngine]:
    """The response; streamed, it must be the same."""
    body = {"input": "hi", **fields}
    engine = scripted(text)
    whole = ask_app(app_of(engine, thinks=thinks), PATH, body)
    assert whole.status_code == 200, whole.text
    streamed = ask_app(app_of(scripted(text), thinks=thinks), PATH, {**body, "stream": True})
    response: dict[str, Any] = whole.json()
    assert without_ids(joined(named_events(streamed.text))) == without_ids(response)
    return response, engine


def part(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: None if name in OWN else without_ids(v) for name, v in value.items()}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


def joined(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The response that a stream ends with, which must be what its other events add up to."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    assert all(data["response"]["status"] == "in_progress" for _, data in events[:2])
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    text = ""
    for name, data in events[2:-1]:
        kind = name.removeprefix("response.")
        assert data["output_index"] == (len(items) if kind == "output_item.added" else len(items) - 1)
        if "item_id" in data:
            assert data["item_id"] == items[-1]["id"]
        match kind:
            case "output_item.added":
                assert data["item"]["status"] == "in_progress" and len(done) == len(items)
                items.append(data["item"])
                text = ""
            case "content_part.added":
                assert data["part"]["text"] == ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                text += data["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert data["text"] == text
            case "function_call_arguments.done":
                assert (data["arguments"], data["name"]) == (text, items[-1]["name"])
            case "content_part.done":
                assert data["part"]["text"] == text
            case "output_item.done":
                assert data["item"]["id"] == items[-1]["id"]
                done.append(data["item"])
            case _:
                raise AssertionError(name)
    name, last = events[-1]
    response: dict[str, Any] = last["response"]
    assert response["output"] == done
    ending = response["status"] if response["status"] in ("completed", "failed") else "incomplete"
    assert name == f"response.{ending}"
    return response


def refuse(**fields: Any) -> dict[str, Any]:
    engine = scripted("x")
    response = ask_app(app_of(engine), PATH, {"input": "hi", **fields})
    assert response.status_code == 400, response.text
    assert not engine.requests
    error: dict[str, Any] = response.json()["error"]
    return error


def test_a_response_has_openais_shape() -> None:
    response, engine = create("hello", instructions="be brief", metadata={"a": "b"}, user="me")
    assert response["id"].startswith("resp_") and response["object"] == "response"
    assert (response["status"], response["error"], response["incomplete_details"]) == (
        "completed",
        None,
        None,
    )
    (item,) = response["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    prompt = "system:be brief\nuser:hi\n"
    assert prompt_of(engine) == prompt
    assert response["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + 6,
    }
    assert (response["metadata"], response["user"], response["store"]) == ({"a": "b"}, "me", True)
    assert (response["temperature"], response["top_p"], response["tools"]) == (1.0, 1.0, [])
    assert response["text"]["format"] == {"type": "text"}


def test_a_response_that_the_limit_cuts_off() -> None:
    response, _ = create("hello", max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "hel"


def test_thoughts_text_and_calls_are_items_in_order() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
    response, engine = create(
        f"so\n</think>\n\nLet me see. {call}\n{call}",
        thinks=True,
        tools=[TOOL],
        reasoning={"effort": "low"},
        include=["reasoning.encrypted_content"],
    )
    thought, said, first, second = response["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "so"}]
    assert said["content"][0]["text"] == "Let me see."
    assert (first["type"], first["name"], first["arguments"]) == ("function_call", "now", '{"zone": "é"}')
    assert first["id"] != second["id"] and first["call_id"] != second["call_id"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len("so\n</think>")}
    assert response["tools"] == [TOOL]
    assert prompt_of(engine) == "user:hi\ntool:now\n<think>"
    # Clients that keep nothing else of the thoughts return what they cannot read.
    sent_back = {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "encrypted_content": thought["encrypted_content"],
    }
    _, engine = create("x", input=[sent_back, {"role": "user", "content": "?"}])
    assert prompt_of(engine) == "assistant:|thought:so\nuser:?\n"


@pytest.mark.parametrize(
    ("after", "statuses"),
    [
        ("", ["incomplete"]),  # within the arguments of the only call
        ('"}}\n</tool_call>', ["completed"]),  # the call is whole, though the answer is not
        ('"}}\n</tool_call> and', ["completed", "incomplete"]),
        ('"}}\n</tool_call><tool_call>{"name": "now", "arguments": {"z', ["completed", "incomplete"]),
    ],
)
def test_the_last_item_alone_is_incomplete_where_a_limit_cut_it_off(after: str, statuses: list[str]) -> None:
    """Also in the event that ends it: clients run the calls of items that are complete."""
    text = '<tool_call>\n{"name": "now", "arguments": {"zone": "Par' + after
    response, _ = create(text + "!", tools=[TOOL], max_output_tokens=len(text))
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == statuses


def test_a_conversation_reaches_the_template() -> None:
    items = [
        {"role": "developer", "content": "always"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "what time?"}]},
        # As the official client dumps an answer's items.
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None, "status": None,
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": None,
         "content": [{"type": "output_text", "text": "wait", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": '{"a": 1}',
         "status": "completed", "namespace": None},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c2", "output": [part("13:00")]},
        {"type": "message", "role": "assistant", "content": "one"},
        {"type": "message", "role": "assistant", "content": "two"},
        {"role": "user", "content": "and now?"},
    ]  # fmt: skip
    _, engine = create("x", instructions="be brief", input=items, tools=[TOOL])
    assert prompt_of(engine) == (
        "system:be brief\n\nalways\nuser:what time?\n"
        'assistant:wait|thought:hm|call:c1:now{"a": 1}|call:c2:now{}\n'
        "tool:12:00|of:c1\ntool:13:00|of:c2\nassistant:one\nassistant:two\nuser:and now?\ntool:now\n"
    )


def test_functions_of_a_namespace_keep_it() -> None:
    mail = {
        "type": "namespace",
        "name": "mcp__mail",
        "description": "Mail.",
        "tools": [{**TOOL, "name": "now"}],
    }
    call = '<tool_call>\n{"name": "mcp__mail__now", "arguments": {}}\n</tool_call>'
    response, engine = create(call, tools=[TOOL, mail], client_metadata={"session": "1"})
    assert prompt_of(engine) == "user:hi\ntool:now\ntool:mcp__mail__now\n"
    (made,) = response["output"]
    assert (made["namespace"], made["name"]) == ("mcp__mail", "now")
    _, engine = create("x", tools=[mail], input=[{"role": "user", "content": "hi"}, made])
    assert prompt_of(engine).startswith(f"user:hi\nassistant:|call:{made['call_id']}:mcp__mail__now{{}}\n")


def test_a_request_as_coding_agents_send_it() -> None:
    mail = {"type": "namespace", "name": "mail", "description": "Mail.", "tools": [{**TOOL, "strict": False}]}
    items = [
        {"type": "message", "id": f"msg_{i}", "role": role, "content": [part(text)]}
        for i, (role, text) in enumerate([("developer", "one"), ("developer", "two"), ("user", "hi")])
    ]
    _, engine = create(
        "x",
        thinks=True,
        input=items,
        tools=[{**TOOL, "strict": False}, mail],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="01a2",
        client_metadata={"x-turn": "{}"},
    )
    assert prompt_of(engine) == "system:one\n\ntwo\nuser:hi\ntool:now\ntool:mail__now\n<think></think>"


def test_reasoning_effort_switches_thinking() -> None:
    for effort, end in (("none", "<think></think>"), ("minimal", "\n<think>"), ("high", "\n<think>")):
        _, engine = create("x</think>y", thinks=True, reasoning={"effort": effort, "summary": "auto"})
        assert prompt_of(engine).endswith(end)
    assert create("y", reasoning={"effort": "high"})[0]["status"] == "completed"
    assert refuse(reasoning={"effort": "loud"})["param"] == "reasoning.effort"


def test_logprobs_where_there_is_only_text() -> None:
    response, engine = create("ab", top_logprobs=1, include=["message.output_text.logprobs"])
    assert engine.requests[0].sampling.logprobs == 1
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["a", "b"]
    assert logprobs[0]["top_logprobs"] == [{"token": "a", "logprob": -0.25, "bytes": [97]}]


def test_an_output_that_obeys_a_schema() -> None:
    wanted = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    response, engine = create("{}", text={"format": wanted})
    assert engine.requests[0].grammar is not None
    assert response["text"]["format"] == wanted


def test_truncation_leaves_out_the_oldest_turns() -> None:
    turns: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    for i in range(9):
        turns += [
            {"role": "user", "content": f"{i}" * 1000},
            {"role": "assistant", "content": "ok"},
        ]
    turns.append({"role": "user", "content": "end"})
    engine = scripted("x")
    ask = ask_app(app_of(engine), PATH, {"input": turns, "truncation": "auto"})
    assert ask.status_code == 200, ask.text
    prompt = prompt_of(engine)
    # Eight turns of some 1,019 tokens fit into 8,191, nine do not.
    assert prompt.startswith("system:s\nuser:1111") and prompt.endswith("user:end\n")
    assert refuse(input=turns)["code"] == "context_length_exceeded"
    long = [{"role": "user", "content": "x" * 9000}]
    assert refuse(input=long, truncation="auto")["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"min_tokens": 9, "max_output_tokens": 3}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "colour": "red"}]}, "tools[0].colour"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": FORMAT}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "x"}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.weather"]}, "include"),
        ({"top_logprobs": 99}, "top_logprobs"),
        ({"tools": [TOOL], "top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"truncation": "middle"}, "truncation"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"colour": "low"}}, "text.colour"),
        ({"n": 2}, "n"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
    ],
)  # fmt: skip
def test_faults_are_named_as_the_route_calls_them(fields: dict[str, Any], param: str) -> None:
    error = refuse(**fields)
    assert error["param"] == param
    assert error["message"].startswith(param)


def test_a_tool_of_others_is_refused_with_what_there_is() -> None:
    message = refuse(tools=[TOOL, {"type": "web_search", "external_web_access": False}])["message"]
    assert message.startswith("tools[1].type: expected function or namespace") and "web_search" in message


def test_an_unknown_predecessor_is_a_404() -> None:
    response = ask_app(app_of(scripted("x")), PATH, {"input": "hi", "previous_response_id": "resp_x"})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "previous_response_id"


def test_a_failing_stream_ends_with_a_failed_response() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        call = Call(app, PATH, {"input": "hi", "stream": True, "request_id": "job"})
        await spin()
        engine.step()
        await call.until(lambda: b"output_text.delta" in call.body)
        engine.die()
        await call.task
        name, data = named_events(call.body)[-1]
        assert (name, data["response"]["status"]) == ("response.failed", "failed")
        assert data["response"]["error"]["message"] == "the engine process has ended"
        stored = Call(app, PATH + "/resp_job", method="GET")
        await stored.task
        assert json.loads(stored.body)["status"] == "failed"
        assert app.num_live == 0

    run(main)


def test_an_aborted_response_is_cancelled() -> None:
    engine = scripted("hello", paused=True)

    async def main() -> None:
        app = app_of(engine)
        call = Call(app, PATH, {"input": "hi", "request_id": "job"})
        await spin()
        engine.step()
        await Call(app, "/v1/abort", {"request_id": "resp_job"}).task
        await call.task
        response = json.loads(call.body)
        assert (response["id"], response["status"]) == ("resp_job", "cancelled")
        assert response["output"][0]["content"][0]["text"] == "h"

    run(main)
