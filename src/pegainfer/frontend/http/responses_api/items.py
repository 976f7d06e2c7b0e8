"""Items of a response's input, checked and made plain, and the chat messages that they stand for.

    input: text, messages, calls, results, thoughts ──► normalised items (what is stored) ──► messages

An answer's items may be sent back as they came. Thoughts, text and calls of one turn are one message.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from pegainfer.frontend.http.request.body import convert
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.http.request.messages import MAX_MESSAGES
from pegainfer.frontend.http.request.thinking import decoded_thoughts
from pegainfer.frontend.http.request.turns import SYSTEMS, Draft
from pegainfer.frontend.http.responses_api.tools import model_name
from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import read_object

PARAGRAPH = "\n\n"  # between what several systems say
ROLES = ("user", "assistant", "system", "developer")


class Part(msgspec.Struct, kw_only=True):
    """Other fields belong to part types that are refused by `type`, or came with an answer."""

    type: str
    text: str | None = None


class MessageItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str = "message"
    role: str
    content: str | list[Part]
    id: str | None = None
    status: str | None = None


class CallItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    name: str
    arguments: str  # a JSON object
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class ResultItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None


class ReasoningItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    id: str | None = None
    summary: list[Part] = []
    content: list[Part] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem
_KINDS: dict[str, tuple[type[Item], str]] = {
    "message": (MessageItem, "msg"),
    "function_call": (CallItem, "fc"),
    "function_call_output": (ResultItem, "fco"),
    "reasoning": (ReasoningItem, "rs"),
}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def normalised(given: str | list[JsonObject] | None) -> list[JsonObject]:
    """The items of an `input`, each with an id, as they are stored and listed. Raises ApiError (400)."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    at_most("input", len(given), MAX_MESSAGES, "items")
    return [_normalised(item, f"input[{i}]") for i, item in enumerate(given)]


def _normalised(raw: JsonObject, where: str) -> JsonObject:
    kind = raw.get("type", "message")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise bad_value(f"{where}.type", f"one of {known}", repr(str(kind)[:60]), code="unsupported")
    struct, prefix = _KINDS[kind]
    # Null is as good as absent: clients send answers back with all the fields that they know of.
    item: Any = convert({name: value for name, value in raw.items() if value is not None}, struct, where)
    out: JsonObject = {"type": kind, "id": item.id or new_id(prefix)}
    match item:
        case MessageItem():
            if item.role not in ROLES:
                raise bad_value(f"{where}.role", "one of " + ", ".join(ROLES), repr(item.role[:40]))
            text = _text(item.content, f"{where}.content", empty=item.role == "assistant")
            part: JsonObject = {"type": "input_text", "text": text}
            if item.role == "assistant":
                part = {"type": "output_text", "text": text, "annotations": []}
            out |= {"status": "completed", "role": item.role, "content": [part]}
        case CallItem():
            if read_object(item.arguments or "{}") is None:
                raise bad_value(f"{where}.arguments", "a JSON object", repr(item.arguments)[:100])
            if not item.name:
                raise bad_value(f"{where}.name", "a name", "an empty one")
            out |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            out["status"] = item.status or "completed"
            if item.namespace is not None:
                out["namespace"] = item.namespace
        case ResultItem():
            out |= {"call_id": item.call_id, "output": _text(item.output, f"{where}.output", empty=True)}
            out["status"] = item.status or "completed"
        case ReasoningItem():
            out |= {"summary": [], "content": [{"type": "reasoning_text", "text": _thoughts(item, where)}]}
    return out


def _text(content: str | list[Part], where: str, *, empty: bool = False) -> str:
    """`empty`: there may be no part."""
    if isinstance(content, str):
        return content
    if not content and not empty:
        raise bad_value(where, "at least one part", "none")
    for i, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            expected = "input_text or output_text with a text"
            raise bad_value(f"{where}[{i}].type", expected, repr(part.type[:40]), code="unsupported")
    return "\n".join(part.text or "" for part in content)


def _thoughts(item: ReasoningItem, where: str) -> str:
    if item.content or item.encrypted_content is None:
        return "\n".join(part.text or "" for part in item.content or item.summary)
    found = decoded_thoughts(item.encrypted_content)
    if found is None:
        raise bad_value(f"{where}.encrypted_content", "what this server gave", "another's")
    return found


def chat_drafts(instructions: str | None, items: Sequence[JsonObject]) -> list[Draft]:
    """The chat of normalised items. What systems say at the beginning stands in one message."""
    out: list[Draft] = []
    if instructions:
        out.append(Draft("system", [instructions], between=PARAGRAPH))
    for item in items:
        match item["type"]:
            case "function_call_output":
                out.append(Draft("tool", [item["output"]], tool_call_id=item["call_id"]))
            case "message" if item["role"] != "assistant":
                _add_message(out, item)
            case _:
                _add_assistant(out, item)
    return out


def _add_message(out: list[Draft], item: JsonObject) -> None:
    role, text = item["role"], item["content"][0]["text"]
    if role in SYSTEMS and len(out) == 1 and out[0].role in SYSTEMS:
        out[0].texts.append(text)
    else:
        out.append(Draft(role, [text], between=PARAGRAPH))


def _add_assistant(out: list[Draft], item: JsonObject) -> None:
    """Thoughts begin a message, and so does text after text or after a call."""
    kind = item["type"]
    if not out or out[-1].role != "assistant" or (kind != "function_call" and out[-1].begun):
        out.append(Draft("assistant"))
    draft = out[-1]
    if kind == "function_call":
        draft.call(item["call_id"], model_name(item.get("namespace"), item["name"]), item["arguments"])
        return
    text = item["content"][0]["text"] if item["content"] else ""
    (draft.thoughts if kind == "reasoning" else draft.texts).append(text)
