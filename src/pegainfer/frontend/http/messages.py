"""The messages of a chat, checked and made plain for the template."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.limits import bad_value

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 8192


class ContentPart(msgspec.Struct, kw_only=True):
    """Other fields belong to part types that are refused by `type`."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Null is as good as absent for all but role: clients send answers back as they got them."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None


_UNSERVED = (
    "refusal",
    "audio",
    "annotations",
    "function_call",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
)


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """What the template sees of each message: role, content as text, name where given. Raises ApiError."""
    if not messages:
        raise bad_value("messages", "at least one message", "none")
    if len(messages) > MAX_MESSAGES:
        raise bad_value("messages", f"≤ {MAX_MESSAGES} messages", len(messages))
    return [_one(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _one(message: Message, where: str) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise _unsupported(f"{where}.role", f"role {message.role!r}")
    if message.role not in ROLES:
        raise bad_value(f"{where}.role", "one of " + ", ".join(ROLES), repr(message.role))
    for field in _UNSERVED:
        value = getattr(message, field)
        if value is not None and value != []:
            raise _unsupported(f"{where}.{field}", "this field")
    if message.content is None:
        raise bad_value(f"{where}.content", "a string or a list of text parts", "null")
    # 'developer' is OpenAI's newer word for the system's voice; templates know only the old one.
    out: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, f"{where}.content"),
    }
    if message.name is not None:
        out["name"] = message.name
    return out


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise bad_value(where, "at least one part", "none")
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(f"{where}[{i}].type", f"a part of type {part.type!r}")
        if part.text is None:
            raise bad_value(f"{where}[{i}].text", "a string", "null")
        texts.append(part.text)
    return "\n".join(texts)


def _unsupported(param: str, what: str) -> ApiError:
    return ApiError(
        400, f"{param}: {what} is not supported yet by this server", param=param, code="unsupported"
    )
