"""Values of arguments that are written one by one, typed by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pegainfer.frontend.tools.call import write_object


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether an argument is a string and nothing else, hence written as it is."""
    kinds = schema.get("type")
    if kinds == "string":
        return True
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return kinds is None and isinstance(values, list) and all(isinstance(v, str) for v in values)


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """An argument's value: what is not a string by its schema is JSON, as far as it can be read as such."""
    if is_text(schema):
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        word = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(word, text)


def member(key: str, text: str, schema: Mapping[str, Any]) -> str:
    """`"key": value` as JSON. A value that JSON cannot hold (1e999, or nested too deeply) is its text."""
    whole = write_object({key: typed(text, schema)}) or json.dumps({key: text}, ensure_ascii=False)
    return whole[1:-1]


def _refuse(constant: str) -> None:
    raise ValueError(constant)
