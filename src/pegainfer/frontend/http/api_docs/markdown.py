"""The OpenAPI document for people: tables in Markdown, which docs/api.md and the page /docs are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pegainfer.frontend.http.api_docs.fields import Schema


def to_markdown(document: Schema) -> str:
    """Each operation with its fields, then the types that they refer to."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Schema) -> Iterator[str]:
    components = document["components"]["schemas"]
    yield "# The API"
    yield ""
    yield document["info"]["description"]
    shown: list[str] = []
    for path, methods in document["paths"].items():
        for method, op in methods.items():
            yield ""
            yield f"## {method.upper()} {path}"
            yield ""
            yield op["summary"] + "."
            parameters = op.get("parameters", [])
            if parameters:
                yield ""
                yield from _table(
                    (p["name"], f"{_type(p['schema'])}, in the {p['in']}", p["description"])
                    for p in parameters
                )
            if "requestBody" in op:
                name = _named(op["requestBody"]["content"]["application/json"]["schema"])
                yield ""
                yield from _fields(components[name])
                shown += [name]
            _, *refusals = op["responses"]
            yield ""
            yield f"Answers {_answer(op['responses']['200']['content'])}; refuses with {', '.join(refusals)}."
    yield ""
    yield "## Types"
    for name, schema in components.items():
        if name not in shown and schema.get("properties"):
            yield ""
            yield f"### {name}"
            yield ""
            yield from _fields(schema)


def _answer(content: dict[str, Schema]) -> str:
    first, *events = content
    what = _type(content[first]["schema"]) if first == "application/json" else first
    return f"{what}, or events where `stream` is true" if events else what


def _fields(schema: Schema) -> Iterator[str]:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        about = field.get("description", "")
        if about == "not served":
            values = " or ".join(_value(v) for v in field["enum"])
            rows.append((name, f"not served: {values} alone", ""))
            continue
        notes = [about] if about else []
        if name in required:
            notes.append("required")
        if field.get("default") is not None:
            notes.append(f"default {_value(field['default'])}")
        rows.append((name, _type(field), "; ".join(notes)))
    yield from _table(rows)


def _table(rows: Any) -> Iterator[str]:
    yield "| field | type | |"
    yield "|---|---|---|"
    for name, kind, about in rows:
        cells = (f"`{name}`", kind, about)
        yield "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"


def _type(schema: Schema) -> str:
    """In a few words."""
    if "$ref" in schema:
        name = _named(schema)
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(s) for s in schema["anyOf"] if s.get("type") != "null")
    if "enum" in schema:
        return " or ".join(_value(v) for v in schema["enum"] if v is not None)
    if "const" in schema:
        return _value(schema["const"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return f"{kind}{_range(schema)}"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above = schema.get("exclusiveMinimum")
    start = f" above {above}" if above is not None else f" from {low}" if low is not None else ""
    # A bound of the integers' own says nothing.
    return start + (f" to {high}" if high is not None and abs(high) < 2**31 - 1 else "")


def _named(schema: Schema) -> str:
    return str(schema["$ref"].rpartition("/")[2])


def _value(value: object) -> str:
    spelt = {None: "null", True: "true", False: "false"}
    known = isinstance(value, bool) or value is None
    return f"`{spelt[value] if known else value}`"  # type: ignore[index]
