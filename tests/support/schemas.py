"""Twenty JSON schemas of the kinds that clients send: nested, enums, arrays, unions, recursion, unicode.

None of them invites an endless answer, as digits without a bound do: a model of this size at temperature 1
takes such an invitation now and then, and the answer then ends at its limit.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(required: dict[str, Any], **optional: Any) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _text(most: int = 40, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _list(items: Any, least: int = 0, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_TREE = {
    "anyOf": [
        _text(12),
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "null"},
        _list({"$ref": "#/$defs/tree"}, most=3),
    ]
}
_EXPRESSION = {
    "anyOf": [
        {"type": "integer", "minimum": -9, "maximum": 9},
        _object({"op": {"enum": ["+", "*"]}, "of": _list({"$ref": "#/$defs/leaf"}, 1, 3)}),
    ]
}

SCHEMAS: dict[str, Schema] = {
    "person": _object({"name": _text(), "age": {"type": "integer", "minimum": 0, "maximum": 130}}),
    "enum": _object({"mood": {"enum": ["happy", "sad", "angry"]}, "strength": {"enum": [1, 2, 3]}}),
    "nested": _object({"a": _object({"b": _object({"c": _object({"d": {"type": "boolean"}})})})}),
    "array of numbers": _list({"type": "integer", "minimum": -1000, "maximum": 1000}, 1, 5),
    "array of objects": _object(
        {"items": _list(_object({"id": {"type": "integer"}, "tag": _text(12)}), 1, 3)}
    ),
    "union": _object({"value": {"anyOf": [_text(20), {"type": "integer"}, {"type": "null"}]}}),
    "type list": _object({"value": {"type": ["string", "boolean", "null"], "maxLength": 20}}),
    "recursion": {"$defs": {"tree": _TREE}, **_object({"value": {"$ref": "#/$defs/tree"}})},
    "mutual recursion": {
        "$defs": {"leaf": {"type": "integer", "minimum": 0, "maximum": 9}, "expression": _EXPRESSION},
        "$ref": "#/$defs/expression",
    },
    "unicode keys": _object(
        {"größe": {"type": "integer"}, "名前": _text(20), "émoji 🙂": {"type": "boolean"}}
    ),
    "unicode values": _object({"city": {"enum": ["Zürich", "東京", "São Paulo", "Kraków 🙂"]}}),
    "const": _object({"kind": {"const": "point"}, "x": {"type": "integer"}, "y": {"type": "integer"}}),
    "tagged union": {
        "anyOf": [
            _object({"type": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1}}),
            _object({"type": {"const": "square"}, "side": {"type": "integer", "minimum": 1}}),
        ]
    },
    "optional": _object({"id": {"type": "integer"}}, note=_text(30), done={"type": "boolean"}),
    "pattern": _object({"plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}}),
    "format": _object(
        {"day": {"type": "string", "format": "date"}, "ip": {"type": "string", "format": "ipv4"}}
    ),
    "bounds": _object(
        {"p": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1}, "n": {"type": "integer"}}
    ),
    "matrix": _object({"rows": _list(_list({"type": "integer", "minimum": 0, "maximum": 9}, 2, 2), 2, 2)}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [_text(10), {"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
}
