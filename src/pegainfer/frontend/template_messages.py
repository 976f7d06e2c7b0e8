"""Messages in the form that a chat template takes, and what the rendered text shows of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer.contract.errors import RequestError

# Marks where the last message ends, for `continue_final_message`. The trailing space shows whether the
# template trims messages: then what stands before the mark is trimmed, too.
_END_MARK = "\ue000end-of-the-final-message\ue000 "
_WORD = re.compile(r"\w{1,40}")


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with each text as a list of one part, for templates that take no other form."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]


def lost_message(messages: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """The first message of a user, a system or a tool of which no word stands in the rendered text.

    Templates may trim or quote a text, so that its words are looked for. What an assistant has said may be
    left out on purpose, as its thoughts are.
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = " ".join(str(part.get("text", "")) for part in content)
        if message.get("role") == "assistant" or not isinstance(content, str):
            continue
        found = _WORD.search(content)
        if found is not None and not any(m[0] in text for m in _WORD.finditer(content)):
            return i
    return None


def with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with the mark after the last one's text."""
    if not messages:
        raise RequestError("there is no message to continue", param="continue_final_message")
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _END_MARK}]
    parts = list(content) if isinstance(content, list) else []
    for i in range(len(parts) - 1, -1, -1):
        text = parts[i].get("text") if isinstance(parts[i], Mapping) else None
        if isinstance(text, str):
            parts[i] = {**parts[i], "text": text + _END_MARK}
            return [*before, {**last, "content": parts}]
    raise RequestError("the last message has no text to continue", param="continue_final_message")


def cut_at_mark(text: str) -> str:
    """The text up to the end of the message that is continued. Raises RequestError where it is not shown."""
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()
