"""Qwen3.5's answers by its own templates: thoughts that begin in the prompt, calls in XML, on every route."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegainfer.contract.request import unpack_tokens
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import client, events
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import LONG
from tests.support.thinking import END, START, VOCAB_SIZE, thinking_tokenizer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "?"}
EOS = 257
TOKENIZER = thinking_tokenizer()
INFO = msgspec.structs.replace(LONG, vocab_size=VOCAB_SIZE)
FOLDER = Path(__file__).parents[3] / "data" / "templates"
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "lines": {"type": "integer"},
        "flags": {"type": "array", "items": {"type": "string"}},
        "force": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "options": {"type": "object"},
    },
    "required": ["path"],
}
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
THOUGHT = "I could write <tool_call>\n<function=write> here, but I only think of it.\n"
WRITTEN = (
    "<tool_call>\n<function=write>\n<parameter=path>\n12\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    '<parameter=flags>\n["a", "ü"]\n</parameter>\n<parameter=force>\nTrue\n</parameter>\n'
    "<parameter=note>\nnull\n</parameter>\n"
    '<parameter=options>\n{"x": {"y": 1.50}}\n</parameter>\n</function>\n</tool_call>'
)
ARGUMENTS = {
    "path": "12", "lines": 3, "flags": ["a", "ü"], "force": True, "note": None, "options": {"x": {"y": 1.5}},
}  # fmt: skip
MANY_LINES = 'def f():\n    return "<b>\\n</b>"\n\n# \U0001f600 </function> stays\n'
LONG_TEXT = (
    f"<tool_call>\n<function=write>\n<parameter=path>\n{MANY_LINES}\n</parameter>\n</function>\n</tool_call>"
)
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
ANSWER = f"{THOUGHT}</think>\n\nThe <tool_call> tag, as a word.\n\n{WRITTEN}\n{LONG_TEXT}\n{NOW}"


def send(text: str, name: str = "qwen3_5_think", path: str = CHAT, most: int = 1, **fields: Any) -> Any:
    """(the answer's text, the last tokens of the prompt). `most`: tokens in an event, drawn."""
    special = {"bos_token": "", "eos_token": "<|im_end|>"}
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), special)
    ids = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    rng = random.Random(most)
    batches: list[tuple[int, ...]] = []
    while ids:
        size = rng.randint(1, most)
        batches.append(tuple(ids[:size]))
        ids = ids[size:]
    engine = FakeEngine(lambda request, index: batches, info=INFO)

    async def main() -> str:
        app = create_app(engine, TOKENIZER, template, HttpConfig())
        async with client(app) as http:
            found = await http.post(path, json={"tools": TOOLS, "messages": [USER], **fields})
            assert found.status_code == 200, found.text
            return found.text

    answer = asyncio.run(asyncio.wait_for(main(), 110))
    return answer, TOKENIZER.decode(unpack_tokens(engine.requests[-1].prompt), skip_special_tokens=False)


def parts(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    return message["reasoning_content"], message["content"], calls


EXPECTED = (
    THOUGHT.strip(),
    "The <tool_call> tag, as a word.",
    [("write", ARGUMENTS), ("write", {"path": MANY_LINES}), ("now", {})],
)


def test_thoughts_prose_and_calls_of_a_whole_answer() -> None:
    answer, prompt = send(ANSWER)
    choice = json.loads(answer)["choices"][0]
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert choice["finish_reason"] == "tool_calls"
    assert parts(choice["message"]) == EXPECTED


@pytest.mark.parametrize("most", [1, 2, 7, 40, 5000])
def test_a_stream_holds_the_same_however_many_tokens_an_event_has(most: int) -> None:
    """With drafts a delta may hold the last value, the end of its call and the next call."""
    whole = json.loads(send(ANSWER)[0])["choices"][0]["message"]["tool_calls"]
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "tool_calls": []}
    for chunk in events(send(ANSWER, most=most, stream=True)[0]):
        if isinstance(chunk, str):
            continue
        delta = chunk["choices"][0]["delta"]
        for name in ("reasoning_content", "content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert parts(message) == EXPECTED
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [
        c["function"]["arguments"] for c in whole
    ]


def test_the_other_routes() -> None:
    answer, _ = send(
        ANSWER,
        path="/v1/messages",
        max_tokens=4000,
        tools=[{"name": t["function"]["name"], "input_schema": PARAMETERS} for t in TOOLS],
        thinking={"type": "adaptive"},
    )
    thought, text, *calls = json.loads(answer)["content"]
    assert (thought["thinking"], text["text"]) == EXPECTED[:2]
    assert [(c["name"], c["input"]) for c in calls] == EXPECTED[2]
    answer, _ = send(
        ANSWER,
        path="/v1/responses",
        input="?",
        messages=None,
        tools=[{"type": "function", **t["function"]} for t in TOOLS],
    )
    thought, text, *calls = json.loads(answer)["output"]
    assert (thought["content"][0]["text"], text["content"][0]["text"]) == EXPECTED[:2]
    assert [(c["name"], json.loads(c["arguments"])) for c in calls] == EXPECTED[2]


@pytest.mark.parametrize(("name", "default"), [("qwen3_5_think", True), ("qwen3_5_nothink", False)])
def test_whether_it_thinks_is_the_templates_choice_and_then_the_requests(name: str, default: bool) -> None:
    for fields, thinks in (
        ({}, default),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": not default}}, not default),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
    ):
        answer, prompt = send("so</think>\n\nYes.", name, tools=None, **fields)
        message = json.loads(answer)["choices"][0]["message"]
        assert prompt.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
        assert message.get("reasoning_content") == ("so" if thinks else None)
        assert message["content"] == ("Yes." if thinks else "so</think>\n\nYes.")


def test_results_and_thoughts_go_back_in_the_families_form() -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "write", "arguments": '{"path": "a\\nb", "lines": 3}'},
    }
    history = [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    _, prompt = send("x", messages=history)
    assert (
        "<think>\nso\n</think>\n\n<tool_call>\n<function=write>\n<parameter=path>\na\nb\n</parameter>\n"
        "<parameter=lines>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\ndone\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ) in prompt


def test_the_budget_is_bounded_by_its_end_token() -> None:
    special = {"bos_token": "", "eos_token": "<|im_end|>"}
    template = ChatTemplate((FOLDER / "qwen3_5_think.jinja").read_text(), special)
    engine = FakeEngine(info=INFO)

    async def main() -> None:
        app = create_app(engine, TOKENIZER, template, HttpConfig())
        try:
            async with client(app) as http:
                body = {"messages": [USER], "thinking_token_budget": 30}
                assert (await http.post(CHAT, json=body)).status_code == 200
        finally:
            app.front.workers.close()

    asyncio.run(asyncio.wait_for(main(), 110))
    grammar = engine.requests[-1].grammar
    assert grammar is not None
    assert (
        "max_tokens=30" in grammar.text
        and f"<[{END}]>" in grammar.text
        and f"<[{START}]>" not in grammar.text
    )
