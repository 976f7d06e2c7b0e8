"""Schemas before they are compiled: what restricts nothing goes, what restricts stays, objects are closed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.grammar.schema import prepared
from tests.null.frontend.grammar.test_compiler import accepts, tokenizer

A = {"a": {"type": "integer"}}


def lets(schema: Any, value: Any, **job: Any) -> bool:
    from llguidance import LLMatcher

    from pegainfer.frontend.grammar.compiler import compile_grammar

    text = compile_grammar(GrammarJob("json_schema", json.dumps(schema), **job), tokenizer())
    matcher = LLMatcher(tokenizer(), text, log_level=0)
    said = value if isinstance(value, str) else json.dumps(value)
    return all(matcher.consume_token(byte) for byte in said.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    "name", ["uuid4", "path", "password", "binary", "decimal", "byte", "phone", "int64", "uri-reference"]
)
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    assert lets({"type": "string", "format": name, "maxLength": 3}, '"abc"')
    assert not lets({"type": "string", "format": name, "maxLength": 3}, '"abcd"')


def test_a_known_format_is_enforced() -> None:
    assert accepts("json_schema", {"type": "string", "format": "date"}, '"2024-02-28"')
    assert not accepts("json_schema", {"type": "string", "format": "date"}, '"yesterday"')


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"dependentRequired": {}},
        {"if": {"type": "object"}},
        {"minContains": 1},
        {"unevaluatedProperties": True},
    ],
)
def test_a_keyword_that_restricts_nothing(keyword: dict[str, Any]) -> None:
    assert lets({"type": "object", "properties": A, **keyword}, {"a": 1})


@pytest.mark.parametrize(
    "keyword",
    [
        {"uniqueItems": True},
        {"not": {"required": ["a"]}},
        {"propertyNames": {"minLength": 3}},
        {"contains": {}},
        {"dependentRequired": {"a": ["b"]}},
    ],
)
def test_a_keyword_that_restricts_and_is_not_enforced_is_an_error(keyword: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="Unimplemented keys"):
        lets({"properties": A, **keyword}, {"a": 1})


def test_a_property_of_a_keywords_name_is_no_keyword() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string"}, "uniqueItems": {"const": False}}}
    assert prepared(schema, closed=False) == schema
    assert lets(schema, {"format": "x", "uniqueItems": False})


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-(2**62), 0, 2**63 - 1], [2**63]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1]),
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [-(2**53) + 1, 2**53 - 1], [2**53 + 2]),
        ({"exclusiveMinimum": -(2**70)}, [-(2**62)], []),
    ],
)
def test_bounds_of_64_bits(bounds: dict[str, int], good: list[int], bad: list[int]) -> None:
    schema = {"type": "integer", **bounds}
    assert all(lets(schema, value) for value in good)
    assert not any(lets(schema, value) for value in bad)


def test_keys_of_a_record() -> None:
    values = {"type": "object", "additionalProperties": {"type": "boolean"}}
    some = {**values, "propertyNames": {"enum": ["x", "y"]}}
    assert lets(some, {"x": True}) and not lets(some, {"z": True}) and not lets(some, {"x": 1})
    spelt = {**values, "propertyNames": {"type": "string", "pattern": "^[a-c]+$"}}
    assert lets(spelt, {"abc": True}) and not lets(spelt, {"abd": True})


def test_objects_are_closed_unless_the_schema_or_a_flag_says_otherwise() -> None:
    more = {"a": 1, "b": 2}
    schema = {"type": "object", "properties": A}
    assert lets(schema, {"a": 1}) and not lets(schema, more)
    assert lets(schema, more, open_objects=True)
    assert lets({**schema, "additionalProperties": True}, more)
    assert lets({"type": "object"}, more)
    nested = {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": schema}}
    assert not lets(nested, [more])


def test_parts_of_a_combination_are_not_closed_by_themselves() -> None:
    both = {"allOf": [{"type": "object", "properties": A}, {"type": "object", "properties": {"b": {}}}]}
    assert lets(both, {"a": 1, "b": 2})
    one = {"anyOf": [{"type": "object", "properties": A}, {"type": "object", "properties": {"b": {}}}]}
    assert lets(one, {"a": 1}) and not lets(one, {"c": 1})
