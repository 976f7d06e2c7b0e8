"""Tools for models whose chat template knows none: told in the system turn, in Hermes' form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INTRODUCTION = (
    "You can call these functions, each given as JSON on a line of its own:\n{tools}\n"
    "To call one, answer with its name and arguments as JSON within tags, and with nothing else:\n"
    '<tool_call>\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)


def knows_tools(template: str) -> bool:
    """Whether a template shows the tools that it is given."""
    return re.search(r"\btools\b", template) is not None


def plain_messages(messages: Sequence[Message], tools: Sequence[Message] | None) -> list[Message]:
    """The same conversation in system, user and assistant turns of text alone."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and "results" in out[-1]:  # those of one turn stand together
                out[-1]["results"].append(text)
            else:
                out.append({"role": "user", "results": [text]})
        elif message.get("tool_calls"):
            calls = [_spelt(call["function"]) for call in message["tool_calls"]]
            parts = [message.get("content") or "", *calls]
            out.append({"role": "assistant", "content": "\n".join(p for p in parts if p)})
        else:
            out.append(dict(message))
    for message in out:
        if "results" in message:
            message["content"] = "\n".join(message.pop("results"))
    if tools:
        text = _INTRODUCTION.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{text}"
        else:
            out.insert(0, {"role": "system", "content": text})
    return list(out)


def _spelt(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
