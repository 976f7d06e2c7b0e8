"""Odd messages: nothing said, one token, a stop in the middle of a call, what no text can hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.null.frontend.http.anthropic.test_messages import TOOL, USER, refuse, send
from tests.support.scripted import prompt_of

CALL = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def kinds(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


@pytest.mark.parametrize(
    ("text", "fields", "content", "reason"),
    [
        ("", {}, [], "end_turn"),
        ("hello", {"max_tokens": 1}, ["text"], "max_tokens"),
        ("é", {"max_tokens": 1}, [], "max_tokens"),  # half a character
        (CALL % "{}", {"max_tokens": 1, "tools": [TOOL]}, ["text"], "max_tokens"),
        ("STOP", {"stop_sequences": ["STOP"]}, [], "stop_sequence"),
        ("a STOP", {"stop_sequences": []}, ["text"], "end_turn"),
        (
            CALL % '{"a": "STOP"}',
            {"stop_sequences": ["STOP"], "tools": [TOOL]},
            ["tool_use"],
            "stop_sequence",
        ),
        ("a" + CALL % "{}" + "b" + CALL % "{}", {"tools": [TOOL]}, ["text", "tool_use"] * 2, "tool_use"),
        (CALL % "{", {"tools": [TOOL]}, ["tool_use"], "tool_use"),  # only the brace around is missing
        (CALL % '{"a": x}', {"tools": [TOOL]}, ["tool_use"], "end_turn"),  # the call cannot be made
        (CALL % "[1]", {"tools": [TOOL]}, ["text"], "end_turn"),
        (CALL % "{}", {"tools": [TOOL], "tool_choice": {"type": "none"}}, ["text"], "end_turn"),
    ],
)
def test_odd_answers(text: str, fields: dict[str, Any], content: list[str], reason: str) -> None:
    answer, _ = send(text, **fields)
    assert (kinds(answer), answer["stop_reason"]) == (content, reason)
    assert all(block.get("text", "x") for block in answer["content"])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("so", ["thinking"]),  # the end came before the answer
        ("so</think>", ["thinking"]),
        ("</think>x", ["text"]),
        ("</think>", []),
        ("so</think>" + CALL % "{}", ["thinking", "tool_use"]),
    ],
)
def test_odd_thoughts(text: str, content: list[str]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer, _ = send(text, thinks=True, thinking=thinking, max_tokens=2000, tools=[TOOL])
    assert kinds(answer) == content


def test_half_a_character_in_a_call_is_sent_as_its_replacement() -> None:
    answer, _ = send(CALL % '{"a": "\\ud83d", "\\udc00": 1}', tools=[TOOL])
    assert answer["content"][0]["input"] == {"a": "\ufffd", "\ufffd": 1}


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        (
            {"system": [{"type": "text", "text": "a", **CACHED}, {"type": "text", "text": "b"}]},
            "system:a\nb\nuser:hi\n",
        ),
        ({"system": []}, "user:hi\n"),
        ({"system": ""}, "user:hi\n"),
        ({"messages": [{"role": "user", "content": ""}]}, "user:\n"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "", **CACHED}]}]}, "user:\n"),
        ({"messages": [USER, {"role": "assistant", "content": "b "}]}, "user:hi\nassistant:b"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "tool:|of:t\n",
        ),
    ],
)
def test_odd_requests(fields: dict[str, Any], prompt: str) -> None:
    _, engine = send("x", **fields)
    assert prompt_of(engine).startswith(prompt)


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
            "thinking.budget_tokens",
        ),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {"type": "forever"}}]},
            "system[0].cache_control",
        ),
        ({"system": [{"type": "image", "text": "a"}]}, "system[0].type"),
    ],
)
def test_odd_faults(fields: dict[str, Any], start: str) -> None:
    assert refuse(**fields).startswith(start)
