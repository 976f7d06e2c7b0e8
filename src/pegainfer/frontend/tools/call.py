"""A tool that a request offers, and a call that a model makes."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.frontend.json_object import JsonObject

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# A function without parameters takes none, as OpenAI has it.
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(msgspec.Struct, frozen=True):
    """parameters: the JSON schema of the arguments, an object."""

    name: str
    parameters: JsonObject = msgspec.field(default_factory=lambda: NO_PARAMETERS)
    strict: bool = False  # its arguments are enforced by grammar even where the model may choose

    def property_schema(self, name: str) -> JsonObject:
        """Of one argument; empty where the schema says nothing of it."""
        properties = self.parameters.get("properties")
        found = properties.get(name) if isinstance(properties, Mapping) else None
        return found if isinstance(found, dict) else {}


class ToolCall(msgspec.Struct, frozen=True):
    """arguments: a JSON object as text; only what came before the end of a truncated answer may be less."""

    name: str
    arguments: str
    id: str | None = None  # where the model's format has one
    whole: bool = True  # False: the answer's end has cut it off


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def read_object(text: str) -> JsonObject | None:
    """A JSON object, None for anything else. Half a UTF-16 pair, which no text can hold, becomes U+FFFD."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if isinstance(value, dict) and _SURROGATE.search(text):
            value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_object(value: Mapping[str, Any]) -> str | None:
    """Its JSON; None where a number is beyond what JSON has, or it is nested too deeply."""
    try:
        return whole_characters(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return None


def whole_characters(text: str) -> str:
    """Pairs of UTF-16 halves as the characters that they stand for; a single half as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def call_of(value: object, arguments_key: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall | None:
    """The call that a JSON object with a name and arguments stands for."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments: object = next((value[k] for k in arguments_key if k in value), {})
    if isinstance(arguments, str):  # encoded twice, as some models do
        arguments = read_object(arguments)
    if not isinstance(arguments, dict):
        return None
    text = write_object(arguments)
    return None if text is None else ToolCall(whole_characters(value["name"]), text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
