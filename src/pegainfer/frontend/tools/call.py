"""A tool that a request offers, and a call that a model makes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JsonObject = dict[str, Any]
# A function without parameters takes none, as OpenAI has it.
NO_PARAMETERS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tool:
    """parameters: the JSON schema of the arguments, an object."""

    name: str
    parameters: JsonObject = field(default_factory=lambda: NO_PARAMETERS)
    strict: bool = False  # its arguments are enforced by grammar even where the model may choose

    def property_schema(self, name: str) -> JsonObject:
        """Of one argument; empty where the schema says nothing of it."""
        properties = self.parameters.get("properties")
        found = properties.get(name) if isinstance(properties, Mapping) else None
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class ToolCall:
    """arguments: a JSON object as text; only what came before the end of a truncated answer may be less."""

    name: str
    arguments: str
    id: str | None = None  # where the model's format has one


def new_call_id() -> str:
    return "call_" + uuid.uuid4().hex[:24]


def read_object(text: str) -> JsonObject | None:
    """A JSON object, None for anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_object(value: Mapping[str, Any]) -> str | None:
    """Its JSON; None where a number is beyond what JSON has."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None


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
    return None if text is None else ToolCall(value["name"], text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
