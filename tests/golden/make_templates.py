"""Writes tests/data/templates/renders.json: what transformers makes of the templates there.

Run in the golden environment, where transformers is installed: python tests/golden/make_templates.py
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import chat_template_utils

FOLDER = Path(__file__).parents[1] / "data" / "templates"
OUT = FOLDER / "renders.json"
# date_string: Llama's templates write today's date without it.
VARIABLES = {"bos_token": "<BOS>", "eos_token": "<EOS>", "date_string": "26 Jul 2024"}
# What strftime_now formats.
RENDERED_AT = datetime.datetime(2026, 11, 28, 12)
SYSTEM = {"role": "system", "content": "Be brief. <b>&</b> 'ü'"}
USER = {"role": "user", "content": "  How warm is it in Zürich?\n"}
ANSWER = {"role": "assistant", "content": "12 °C."}
THOUGHT = {"role": "assistant", "content": "12 °C.", "reasoning_content": "I remember.\nYes."}
INLINE = {"role": "assistant", "content": "<think>\nI remember.\n</think>\n\n12 °C."}
MORE = {"role": "user", "content": "And in 東京 🙂?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a "city" & <more>',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Zürich", "days": 2}


class FixedClock(datetime.datetime):
    """Replaces the clock that transformers reads, so that every run writes the same file."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> FixedClock:
        return cls.fromisoformat(RENDERED_AT.isoformat())


def called(arguments: Any, *, content: str = "") -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
    }


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "abcdefghi", "name": "get_weather"}


TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, MORE],
    "thoughts": [USER, THOUGHT, MORE],
    "thoughts in the text": [USER, INLINE, MORE],
    "ends with the assistant": [USER, ANSWER],
    "parts": [PARTS],
    "call": [SYSTEM, USER, called(ARGUMENTS), result('{"t": 12}'), ANSWER, MORE],
    "call as text": [SYSTEM, USER, called(TEXT), result('{"t": 12}'), ANSWER, MORE],
    "call with words": [USER, called(ARGUMENTS, content="I look."), result("12"), result("13")],
    "call with words as text": [USER, called(TEXT, content="I look."), result("12"), result("13")],
    "open call": [USER, called(ARGUMENTS)],
    "two users": [USER, MORE],
    "system last": [USER, SYSTEM],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"add_generation_prompt": True, "tools": [TOOL, NOW]},
    "thinking": {"add_generation_prompt": True, "enable_thinking": True},
    "no thinking": {"add_generation_prompt": True, "enable_thinking": False},
}


def render(template: str, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """None where the template refuses the chat."""
    options = dict(options)
    tools = options.pop("tools", None)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [chat], tools=tools, chat_template=template, **VARIABLES, **options
        )
    except Exception:  # jinja2's errors, and what a template's own expressions raise
        return None
    return texts[0]


def main() -> None:
    chat_template_utils.datetime = FixedClock
    renders = {}
    for path in sorted(FOLDER.glob("*.jinja")):
        source = path.read_text()
        cases = {
            f"{chat}, {option}": render(source, CHATS[chat], OPTIONS[option])
            for chat in CHATS
            for option in OPTIONS
        }
        renders[path.stem] = {"sha256": hashlib.sha256(source.encode()).hexdigest(), "cases": cases}
    content = {
        "made_by": f"tests/golden/make_templates.py with transformers {transformers.__version__}",
        "now": RENDERED_AT.isoformat(),
        "variables": VARIABLES,
        "chats": CHATS,
        "options": OPTIONS,
        "templates": renders,
    }
    OUT.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
