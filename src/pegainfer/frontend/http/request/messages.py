"""The messages of a chat, checked and made plain for the template."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pegainfer.frontend.http.request.limits import at_most, bad_value, unsupported
from pegainfer.frontend.http.request.neutral import Harmless, refuse_unserved
from pegainfer.frontend.tools.call import read_object

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 8192


class ContentPart(msgspec.Struct, kw_only=True):
    """Other fields belong to part types that are refused by `type`."""

    type: str
    text: str | None = None


class HistoryFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | dict[str, Any]  # JSON


class HistoryCall(msgspec.Struct, kw_only=True):
    """A call as an answer gave it; fields of streams (`index`) may still be there."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: HistoryFunction


class ReasoningDetail(msgspec.Struct, kw_only=True):
    """A piece of an assistant's thoughts. Only `reasoning.text` can be read by another model."""

    type: str | None = None
    text: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is as good as absent for all but role: clients send answers back as they got them."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[HistoryCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool's result: the call that it answers
    reasoning_content: str | None = None  # of an assistant; the template decides what it shows of it
    reasoning: str | None = None  # the newer name of reasoning_content
    reasoning_details: list[ReasoningDetail] | None = None  # OpenRouter's; read where the others are absent
    # Not served, see GenerateFields.
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    type: Any = None
    # What other servers put beside an answer, and clients send back.
    annotations: Harmless = None
    cache_control: Harmless = None
    id: Harmless = None
    parsed: Harmless = None
    provider_specific_fields: Harmless = None


# Fields that belong to one role.
_ROLE_OF = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "reasoning_details": "assistant",
    "tool_call_id": "tool",
}


def check_number(count: int) -> None:
    """Raises ApiError (400) for a chat of so many messages: none, or too many."""
    if not count:
        raise bad_value("messages", "at least one message", "none")
    at_most("messages", count, MAX_MESSAGES, "messages")


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """What the template sees of each message: role, content as text, name where given. Raises ApiError."""
    check_number(len(messages))
    return [_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _one(message: Message, where: str) -> dict[str, Any]:
    if message.role == "function":
        raise unsupported(f"{where}.role", f"role {message.role!r}")
    if message.role not in ROLES:
        raise bad_value(f"{where}.role", "one of " + ", ".join(ROLES), repr(message.role))
    refuse_unserved(message, where + ".")
    for field, role in _ROLE_OF.items():
        if getattr(message, field) and message.role != role:
            raise bad_value(f"{where}.{field}", f"role {role} beside it", repr(message.role))
    if message.content is None and not message.tool_calls:
        raise bad_value(f"{where}.content", "a string or a list of text parts", "null")
    # 'developer' is OpenAI's newer word for the system's voice; templates know only the old one.
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "" if message.content is None else _text(message.content, f"{where}.content"),
    }
    for name, value in (
        ("name", message.name),
        ("tool_call_id", message.tool_call_id),
        ("reasoning_content", _thoughts(message)),
    ):
        if value is not None:
            out[name] = value
    if message.tool_calls:
        out["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return out


def _thoughts(message: Message) -> str | None:
    for given in (message.reasoning_content, message.reasoning):
        if given is not None:
            return given
    return "".join(detail.text or "" for detail in message.reasoning_details or ()) or None


def _call(call: HistoryCall, where: str) -> dict[str, Any]:
    """A call of the history, its arguments as an object."""
    if call.type not in (None, "function"):
        raise bad_value(f"{where}.type", "function", repr(call.type))
    arguments: object = call.function.arguments
    if isinstance(arguments, str):
        arguments = read_object(arguments or "{}")
    if not isinstance(arguments, dict):
        raise bad_value(f"{where}.function.arguments", "a JSON object", repr(call.function.arguments)[:100])
    if not call.function.name:
        raise bad_value(f"{where}.function.name", "a name", "an empty one")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or "", "type": "function", "function": function}


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with each call's arguments as JSON text: some templates take no object."""
    return [_text_arguments(message) for message in messages]


def _text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise bad_value(where, "at least one part", "none")
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise unsupported(
                f"{where}[{i}].type",
                f"a part of type {part.type!r}",
                remedy="models are served for text alone, those that can see as well",
            )
        if part.text is None:
            raise bad_value(f"{where}[{i}].text", "a string", "null")
        texts.append(part.text)
    return "\n".join(texts)
