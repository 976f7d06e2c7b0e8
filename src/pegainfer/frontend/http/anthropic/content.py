"""Turns of content blocks, and the chat messages that they stand for.

A user's turn holds texts and results of calls, an assistant's texts, thoughts and calls. A result becomes a
message of role tool; neighbouring turns of one role count as one.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pegainfer.frontend.http.request.body import convert
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.messages import check_number
from pegainfer.frontend.http.request.neutral import Harmless
from pegainfer.frontend.http.request.thinking import decoded_thoughts
from pegainfer.frontend.http.request.turns import Draft

# A line that Claude Code puts before its prompt to say who pays: it differs from request to request, is
# nothing for the model, and would keep all that follows from being found in the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header:"


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Asks that a prefix be cached, which here every prefix is."""

    type: str
    ttl: str | None = None
    scope: str | None = None  # with whom it is shared


class SystemBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    text: str
    cache_control: CacheControl | None = None
    citations: Harmless = None


class ResultPart(msgspec.Struct, kw_only=True):
    """Other fields belong to part types that are refused by `type`."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class ContentBlock(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of the types that are served; those of others are refused by `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    citations: Harmless = None  # what an answer's text was drawn from
    caller: Any = None  # who made a call: always the model


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_FIELDS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


def system_text(system: str | list[SystemBlock] | None) -> str:
    """The system's blocks, one a line, without the client's billing header. Raises ApiError (400)."""
    if system is None or isinstance(system, str):
        return system or ""
    for i, block in enumerate(system):
        if block.type != "text":
            raise bad_value(f"system[{i}].type", "text", repr(block.type[:40]))
        _check_cache(block.cache_control, f"system[{i}]")
    return "\n".join(block.text for block in system if not block.text.startswith(BILLING_HEADER))


def prefilled(turns: list[Turn]) -> bool:
    """Whether the last turn is the beginning of the answer, which the model goes on with."""
    if not turns or turns[-1].role != "assistant":
        return False
    content = turns[-1].content
    return isinstance(content, str) or not any(block.get("type") == "tool_use" for block in content)


def chat_drafts(turns: list[Turn]) -> list[Draft]:
    """Raises ApiError (400)."""
    check_number(len(turns))
    out: list[Draft] = []
    for i, turn in enumerate(turns):
        if turn.role not in _OF_ROLE:
            raise bad_value(f"messages[{i}].role", "user, assistant or system", repr(turn.role[:40]))
        blocks = _blocks(turn, f"messages[{i}].content")
        if turn.role == "assistant":
            _add_assistant(out, blocks)
        else:
            for block, where in blocks:
                _add(out, turn.role, block, where)
    return out


def _blocks(turn: Turn, where: str) -> list[tuple[ContentBlock, str]]:
    """The turn's blocks, checked, each with its place for messages."""
    if isinstance(turn.content, str):
        return [(ContentBlock(type="text", text=turn.content), where)]
    if not turn.content:
        raise bad_value(where, "at least one block", "none")
    return [(_block(raw, turn.role, f"{where}[{i}]"), f"{where}[{i}]") for i, raw in enumerate(turn.content)]


def _block(raw: dict[str, Any], role: str, where: str) -> ContentBlock:
    kind = raw.get("type")
    if kind not in _OF_ROLE[role]:
        known = ", ".join(_OF_ROLE[role])
        expected = f"one of {known} in a turn of role {role}"
        raise bad_value(f"{where}.type", expected, repr(str(kind)[:40]), code="unsupported")
    block = convert({name: value for name, value in raw.items() if value is not None}, ContentBlock, where)
    for name in _FIELDS[kind]:
        if getattr(block, name) in (None, "") and not (name in ("text", "thinking") and raw.get(name) == ""):
            raise bad_value(f"{where}.{name}", "a value", "none")
    if block.caller not in (None, {"type": "direct"}):
        raise bad_value(f"{where}.caller", "type direct", "another")
    _check_cache(block.cache_control, where)
    return block


def _check_cache(control: CacheControl | None, where: str) -> None:
    if control is not None and (control.type != "ephemeral" or control.ttl not in (None, "5m", "1h")):
        raise bad_value(f"{where}.cache_control", "type ephemeral, ttl 5m or 1h", repr(control.type[:40]))


def _add(out: list[Draft], role: str, block: ContentBlock, where: str) -> None:
    """A block of a user's or a system's turn."""
    if block.type == "tool_result":
        out.append(Draft("tool", [_result(block, where)], tool_call_id=block.tool_use_id))
        return
    if not out or out[-1].role != role:
        out.append(Draft(role))
    out[-1].texts.append(block.text or "")


def _result(block: ContentBlock, where: str) -> str:
    """A result's text; one that failed says so, for templates have no other place for that."""
    content = block.content or ""
    if not isinstance(content, str):
        for i, part in enumerate(content):
            _check_cache(part.cache_control, f"{where}.content[{i}]")
            if part.type != "text" or part.text is None:
                raise bad_value(
                    f"{where}.content[{i}].type", "text", repr(part.type[:40]), code="unsupported"
                )
        content = "\n".join(part.text or "" for part in content)
    if block.is_error and not content.lower().startswith("error"):
        content = f"Error: {content}"
    return content


def _add_assistant(out: list[Draft], blocks: list[tuple[ContentBlock, str]]) -> None:
    """The blocks of an assistant's turn, in one message with a turn before it that is the assistant's."""
    if not out or out[-1].role != "assistant":
        out.append(Draft("assistant"))
    draft = out[-1]
    for block, _ in blocks:
        match block.type:
            case "thinking":
                draft.thoughts.append(block.thinking or decoded_thoughts(block.signature or "") or "")
            case "tool_use":
                draft.call(block.id, block.name or "", json.dumps(block.input))
            case _:
                draft.texts.append(block.text or "")
