"""`response_format` and `structured_outputs`: from the fields to the grammar that the output must obey."""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from pegainfer.frontend.grammar.compiler import MAX_CHOICES, GrammarJob
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.body import load_json
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.json_object import JsonObject

MAX_TEXT_DEPTH = 64  # of JSON within a string


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: JsonObject | None = None
    description: str | None = None  # for the reader; a template has no place for it
    strict: bool | None = None  # the schema is enforced either way


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's. `type`: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. Exactly one of these."""

    json: JsonObject | str | None = None  # a schema, or its text
    json_object: bool | None = None
    regex: str | None = None  # of the whole output, Rust's syntax
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    # {"structures": [{begin, schema, end}], "triggers": [...]}
    structural_tag: JsonObject | str | None = None


class Formatted(Protocol):
    @property
    def response_format(self) -> ResponseFormat | None: ...
    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...


def grammar_job(r: Formatted, max_bytes: int, *, open_objects: bool = False) -> tuple[str, GrammarJob] | None:
    """The field at work and the grammar it asks for; None for free text. Raises ApiError (400)."""
    found = _of_format(r.response_format)
    if r.structured_outputs is not None:
        if found is not None:
            raise bad_value("structured_outputs", "only one of it and response_format", "both")
        found = structured_job(r.structured_outputs, max_bytes)
    if found is None:
        return None
    at_most(found[0], len(found[1].text.encode()), max_bytes, "bytes")
    return found[0], msgspec.structs.replace(found[1], open_objects=open_objects)


def structured_job(wanted: StructuredOutputs, max_bytes: int) -> tuple[str, GrammarJob]:
    """The field at work and the grammar it asks for. Raises ApiError (400)."""
    param, job = _of_structured(wanted)
    at_most(param, len(job.text.encode()), max_bytes, "bytes")
    return param, job


def _of_format(wanted: ResponseFormat | None) -> tuple[str, GrammarJob] | None:
    if wanted is None:
        return None
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            raise bad_value("response_format.json_schema.schema", "a JSON schema", "none")
        param = "response_format.json_schema.schema"
        return param, GrammarJob("json_schema", _schema(wanted.json_schema.schema, param))
    if wanted.json_schema is not None:
        raise bad_value("response_format.json_schema", "type json_schema beside it", repr(wanted.type))
    if wanted.type == "json_object":
        return "response_format", GrammarJob("json_schema", '{"type": "object"}')
    if wanted.type != "text":
        raise bad_value("response_format.type", "text, json_object or json_schema", repr(wanted.type))
    return None


def _of_structured(wanted: StructuredOutputs) -> tuple[str, GrammarJob]:
    given = [f for f in wanted.__struct_fields__ if getattr(wanted, f) is not None]
    if len(given) != 1:
        one_of = ", ".join(wanted.__struct_fields__)
        raise bad_value("structured_outputs", f"exactly one of {one_of}", ", ".join(given) or "none")
    name = given[0]
    param = f"structured_outputs.{name}"
    value: Any = getattr(wanted, name)
    if value is False or value == "" or value == []:
        raise bad_value(param, "something to obey", json.dumps(value))
    match name:
        case "json":
            return param, GrammarJob("json_schema", _schema(_object(value, param), param))
        case "json_object":
            return param, GrammarJob("json_schema", '{"type": "object"}')
        case "choice":
            at_most(param, len(value), MAX_CHOICES, "choices")
            if "" in value:
                raise bad_value(param, "texts", "an empty one")
            return param, GrammarJob("choice", json.dumps(value))
        case "structural_tag":
            return param, GrammarJob("structural_tag", json.dumps(_tag(_object(value, param), param)))
        case "regex":
            return param, GrammarJob("regex", value)
        case _:
            return param, GrammarJob("lark", value)


def _schema(schema: JsonObject, param: str) -> str:
    if "x-guidance" in schema:
        raise bad_value(f"{param}.x-guidance", "a plain JSON schema", "the compiler's own options")
    return json.dumps(schema)


def _object(value: JsonObject | str, param: str) -> JsonObject:
    if isinstance(value, str):
        try:
            value = load_json(value.encode(), MAX_TEXT_DEPTH)
        except ApiError as error:
            raise bad_value(param, "JSON", "a text that is none: " + error.message) from None
    if not isinstance(value, dict):
        raise bad_value(param, "a JSON object", type(value).__name__)
    return value


class _Structure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: str
    schema: JsonObject
    end: str


class _StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str = "structural_tag"
    structures: list[_Structure]
    triggers: list[str]


def _tag(value: JsonObject, param: str) -> JsonObject:
    """Checks the shape of a structural tag."""
    try:
        tag = msgspec.convert(value, _StructuralTag)
    except msgspec.ValidationError as error:
        raise bad_value(param, "structures and triggers", str(error).replace("`", "")) from None
    if tag.type != "structural_tag" or not tag.structures or not all(tag.triggers) or not tag.triggers:
        raise bad_value(param, "at least one structure and one trigger, none of them empty", "others")
    for structure in tag.structures:
        _schema(structure.schema, f"{param}.schema")
        if not any(structure.begin.startswith(t) for t in tag.triggers):
            raise bad_value(param, "triggers that every structure begins with", repr(structure.begin[:100]))
    return value
