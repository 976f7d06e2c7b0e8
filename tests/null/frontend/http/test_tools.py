"""Tools over HTTP: calls in scripted answers, streamed and not; required ones on the null engine."""

from __future__ import annotations

import contextlib
import datetime
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegainfer.app.grammars import LLGuidanceGrammars
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.render import INLINE_BYTES
from tests.null.frontend.tools.examples import EXAMPLES
from tests.support.asgi import TEMPLATE, TOKENIZER, ask, client, events, run
from tests.support.fake_engine import INFO, FakeEngine, says
from tests.support.null_engine import null_engine

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "?"}
EOS = 257
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
TOOLS = [WEATHER, NOW]
LONG = INFO.__class__(**{**{f: getattr(INFO, f) for f in INFO.__struct_fields__}, "max_model_len": 8192})
THINKING = ChatTemplate(
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{{ tools | tojson }}<tool_call>"
    "{% if add_generation_prompt %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"
)


def fake(text: str) -> FakeEngine:
    return FakeEngine(lambda request, index: [*text.encode(), EOS], info=LONG)


def answer(text: str, **fields: Any) -> dict[str, Any]:
    """The choice of a scripted answer; streamed, it must be the same."""
    config = fields.pop("config", {})
    body = {"messages": [USER], "tools": TOOLS, **fields}
    whole = ask(fake(text), CHAT, body, **config)
    assert whole.status_code == 200, whole.text
    streamed = ask(fake(text), CHAT, {**body, "stream": True}, **config)
    choice: dict[str, Any] = whole.json()["choices"][0]
    assert joined(events(streamed.text)) == without_ids(choice)
    return choice


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
        "finish": choice["finish_reason"],
    }


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream's deltas put together as a client does it."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in [] if isinstance(chunk, str) else chunk["choices"]:
            delta = choice["delta"]
            out["content"] += delta.get("content") or ""
            out["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                index = call.pop("index")
                if index == len(out["calls"]):
                    assert call.pop("id") and call["type"] == "function" and call["function"]["name"]
                    out["calls"].append(call)
                else:
                    assert index == len(out["calls"]) - 1 and call.keys() == {"function"}
                    assert call["function"].keys() == {"arguments"} and call["function"]["arguments"]
                    out["calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
            out["finish"] = choice["finish_reason"] or out["finish"]
    return out


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_of_every_style_streamed_and_not(name: str) -> None:
    example = EXAMPLES[name]
    choice = answer(example.text, config={"tool_call_parser": example.style})
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == list(
        example.calls
    )
    assert choice["finish_reason"] == ("tool_calls" if example.calls else "stop")
    assert message["content"] == (example.content or (None if example.calls else ""))
    assert len({call["id"] for call in calls}) == len(calls)


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_are_the_same_however_many_tokens_an_event_has(name: str) -> None:
    """An event may end one call and begin the next, and cut characters of several bytes."""
    example = EXAMPLES[name]
    text = example.text.replace("Paris", "Zürich \U0001f600")
    config = {"tool_call_parser": example.style}
    body = {"messages": [USER], "tools": TOOLS}
    whole = ask(fake(text), CHAT, body, **config).json()["choices"][0]
    rng = random.Random(name)
    for most in (2, 9, 60, 1000):
        ids = [*text.encode(), EOS]
        batches = []
        while ids:
            size = rng.randint(1, most)
            batches.append(tuple(ids[:size]))
            ids = ids[size:]
        engine = FakeEngine(lambda request, index, batches=batches: batches, info=LONG)
        streamed = ask(engine, CHAT, {**body, "stream": True}, **config)
        assert joined(events(streamed.text)) == without_ids(whole)


def test_arguments_are_streamed_as_they_are_written_on_every_route() -> None:
    written = '{"city": "' + "a long text " * 20 + '"}'
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call>'
    function = WEATHER["function"]
    assert isinstance(function, dict)
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [USER], "tools": TOOLS},
        "/v1/responses": {"input": "?", "tools": [{"type": "function", **function}]},
        "/v1/messages": {
            "messages": [USER],
            "max_tokens": 1000,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    }
    for path, body in bodies.items():
        streamed = ask(fake(text), path, {**body, "stream": True}).text
        found: list[str] = []
        for line in streamed.splitlines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            match event.get("type"):
                case "response.function_call_arguments.delta":
                    found.append(event["delta"])
                case "content_block_delta":
                    found.append(event["delta"]["partial_json"])
                case None:
                    calls = event["choices"][0]["delta"].get("tool_calls", [])
                    found += [call["function"]["arguments"] for call in calls]
        assert "".join(found) == written, path
        assert max(len(piece) for piece in found) <= 2, path


def test_parallel_calls_false_keeps_the_first_one() -> None:
    choice = answer(EXAMPLES["hermes"].text, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]


def test_a_limit_in_a_call_is_told_as_length() -> None:
    text = EXAMPLES["hermes"].text
    choice = answer(text, max_tokens=text.index('"days"'))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris", '


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_markers_are_text(fields: dict[str, Any]) -> None:
    text = EXAMPLES["hermes"].text
    choice = answer(text, **fields)
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


def test_stop_strings_hold_in_calls_too() -> None:
    choice = answer('a<tool_call>{"name": "now"}</tool_call>b END c', stop="END")
    assert choice["message"]["content"] == "ab"
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["now"]


def test_logprobs_of_calls_add_up() -> None:
    text = EXAMPLES["hermes"].text
    body = {"messages": [USER], "tools": TOOLS, "logprobs": True}
    whole = ask(fake(text), CHAT, body).json()["choices"][0]["logprobs"]["content"]
    chunks = events(ask(fake(text), CHAT, {**body, "stream": True}).text)
    parts = [c["choices"][0]["logprobs"] for c in chunks if c != "[DONE]"]
    assert [e for p in parts if p for e in p["content"]] == whole
    assert bytes(b for e in whole for b in e["bytes"]).decode() == text


def prompt(**body: Any) -> str:
    found = ask(fake(""), "/apply_template", body)
    assert found.status_code == 200, found.text
    text: str = found.json()["prompt"]
    return text


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": "ü"}'}}


def test_tools_and_history_reach_a_template_that_knows_none() -> None:
    text = prompt(
        messages=[
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
            {"role": "tool", "tool_call_id": "2", "content": "12"},
        ],
        tools=TOOLS,
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions")
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "now", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>' in text
    assert (
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\n12\n</tool_response>"
        in text
    )


@contextlib.asynccontextmanager
async def served(template: ChatTemplate | None = None, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The null engine with grammars behind the app."""
    grammars = LLGuidanceGrammars(lambda: vocabulary_of(TOKENIZER), 258)
    with null_engine(grammars=grammars) as engine:
        app = create_app(engine, TOKENIZER, template or TEMPLATE, HttpConfig(**config))
        try:
            async with client(app) as http:
                yield http
        finally:
            app.front.workers.close()


@pytest.mark.parametrize(
    "style", ["hermes", "llama3_json", "qwen3_coder", "kimi_k2", "deepseek_v32", "pythonic"]
)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_are_asked_for_are_made(style: str, choice: str) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    body = {
        "messages": [USER], "tools": TOOLS, "parallel_tool_calls": False, "n": 4, "max_tokens": 700,
        "tool_choice": "required" if choice == "required" else named,
    }  # fmt: skip

    async def main() -> None:
        async with served(tool_call_parser=style) as http:
            for seed in range(3):
                found = await http.post(CHAT, json={**body, "seed": seed})
                assert found.status_code == 200, found.text
                for each in found.json()["choices"]:
                    assert each["finish_reason"] in ("tool_calls", "length")
                    if each["finish_reason"] == "length":
                        continue
                    assert each["message"]["content"] is None
                    (call,) = each["message"]["tool_calls"]
                    function = call["function"]
                    assert choice == "required" or function["name"] == "now"
                    arguments = json.loads(function["arguments"])
                    if function["name"] == "now":
                        assert arguments == {}
                    else:
                        assert isinstance(arguments["city"], str) and arguments.get("days", 0) <= 9

    run(main)


def test_thoughts_come_before_an_enforced_answer() -> None:
    """The null engine writes any bytes for thoughts, so only their place can be told."""

    async def main() -> None:
        async with served(THINKING, chat_template_kwargs=("enable_thinking",)) as http:
            body: dict[str, Any] = {"messages": [USER], "structured_outputs": {"choice": ["yes", "no"]}}
            plain = await http.post(CHAT, json={**body, "max_tokens": 8})
            assert plain.json()["choices"][0]["message"]["content"] in ("yes", "no")
            assert "reasoning_content" not in plain.json()["choices"][0]["message"]
            body["chat_template_kwargs"] = {"enable_thinking": True}
            thought = (await http.post(CHAT, json={**body, "max_tokens": 300})).json()["choices"][0]
            assert thought["message"]["reasoning_content"]
            assert thought["message"]["content"] in ("", "yes", "no")

    run(main)


@pytest.mark.parametrize("thinking", [True, False])
def test_reasoning_is_kept_apart(thinking: bool) -> None:
    text = "I see.\n</think>\n\nYes."
    engine = FakeEngine(lambda request, index: [*text.encode(), EOS], info=LONG)

    async def main() -> None:
        app = create_app(engine, TOKENIZER, THINKING, HttpConfig())
        async with client(app) as http:
            body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": thinking}}
            whole = (await http.post(CHAT, json=body)).json()["choices"][0]
            streamed = joined(events((await http.post(CHAT, json={**body, "stream": True})).text))
        assert streamed == without_ids(whole)
        assert whole["message"]["content"] == ("Yes." if thinking else text)
        assert whole["message"].get("reasoning_content") == ("I see." if thinking else None)

    run(main)


@pytest.mark.parametrize("end", ["</think>", ""], ids=["thoughts that end", "thoughts that a call ends"])
def test_kimi_calls_tools_amid_its_thoughts(end: str) -> None:
    text = "<think>I look. " + end + EXAMPLES["kimi_k2"].text.removeprefix("OK")
    template = ChatTemplate((TEMPLATES / "kimi_k2_thinking.jinja").read_text(), {})
    engine = FakeEngine(lambda request, index: [*text.encode(), EOS], info=LONG)

    async def main() -> None:
        app = create_app(engine, TOKENIZER, template, HttpConfig())
        async with client(app) as http:
            body = {"messages": [USER], "tools": TOOLS}
            whole = (await http.post(CHAT, json=body)).json()["choices"][0]
            streamed = joined(events((await http.post(CHAT, json={**body, "stream": True})).text))
        assert streamed == without_ids(whole)
        assert whole["finish_reason"] == "tool_calls"
        assert whole["message"]["reasoning_content"] == "I look."
        assert not whole["message"]["content"]
        calls = whole["message"]["tool_calls"]
        assert [c["id"] for c in calls] == ["functions.get_weather:0", "functions.now:1"]
        assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Paris", "days": 2}

    run(main)


def test_special_tokens_that_are_markers_reach_the_parser() -> None:
    """<|im_start|> is a special token here, and taken for a style's marker."""
    says("")
    engine = FakeEngine(lambda request, index: [*b"a", 256, *b"b", EOS], info=LONG)
    answer = ask(engine, CHAT, {"messages": [USER]}).json()["choices"][0]
    assert answer["message"]["content"] == "ab"
    app = create_app(engine, TOKENIZER, TEMPLATE, HttpConfig())
    assert app.front.special_id("<|im_start|>") == 256
    assert app.front.special_id("a") is None
    assert app.front.marker_ids(tools=True) == frozenset()


DEEPSEEK = ChatTemplate(
    (TEMPLATES / "deepseekv3.jinja").read_text(),
    {"bos_token": "<b>", "eos_token": "<e>"},
)


def test_a_template_that_takes_no_object_gets_the_arguments_as_text() -> None:
    async def main() -> None:
        app = create_app(fake(""), TOKENIZER, DEEPSEEK, HttpConfig(tool_call_parser="deepseek_v3"))
        async with client(app) as http:
            history = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
            found = await http.post("/apply_template", json={"messages": history})
            assert "now\n```json\n" + '{"a": "ü"}' + "\n```<｜tool▁call▁end｜>" in found.json()["prompt"]

    run(main)


def test_a_long_chat_renders_in_a_worker_and_equals_the_short_way() -> None:
    async def main() -> None:
        app = create_app(fake(""), TOKENIZER, TEMPLATE, HttpConfig())
        long = "ü" * INLINE_BYTES
        async with client(app) as http:
            for extra in ({}, {"continue_final_message": True}):
                messages = [USER, {"role": "assistant", "content": "yes " + long}]
                found = await http.post("/apply_template", json={"messages": messages, **extra})
                options = {"add_generation_prompt": not extra, "continue_final_message": bool(extra)}
                now = datetime.datetime(2026, 11, 28)  # the template shows no date
                assert found.json()["prompt"] == TEMPLATE.render(messages, now=now, **options)
        app.front.workers.close()

    run(main)


@pytest.mark.parametrize("size", [10, INLINE_BYTES])
def test_the_server_renders_with_its_clock(size: int) -> None:
    """Both ways: in the server's process and, for long chats, in a worker."""
    dated = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}")

    async def main() -> None:
        app = create_app(fake(""), TOKENIZER, dated, HttpConfig())
        before = datetime.date.today()
        async with client(app) as http:
            messages = [{"role": "user", "content": "x" * size}]
            found = await http.post("/apply_template", json={"messages": messages})
        after = datetime.date.today()  # another day where midnight passed in between
        assert datetime.date.fromisoformat(found.json()["prompt"]) in (before, after)
        app.front.workers.close()

    run(main)


@pytest.mark.parametrize("size", [10, 300_000])
def test_an_endless_template_ends_in_a_400(size: int) -> None:
    endless = ChatTemplate(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
        seconds=0.2,
    )

    async def main() -> None:
        app = create_app(fake(""), TOKENIZER, endless, HttpConfig(template_seconds=0.2))
        async with client(app) as http:
            body = {"messages": [{"role": "user", "content": "x" * size}]}
            found = await http.post(CHAT, json=body)
            assert found.status_code == 400
            assert found.json()["error"]["code"] is None
            assert (await http.get("/health")).status_code == 200
        app.front.workers.close()

    run(main)
