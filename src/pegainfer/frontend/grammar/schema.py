"""JSON schemas made ready for the grammar compiler, which refuses keywords that it does not enforce.

Keywords that restrict nothing are left out: unknown formats, which JSON Schema takes for annotations, and
values that every instance satisfies. Keywords are rewritten where another one says the same. All else stays,
so that a keyword that restricts and is not enforced is still an error.
"""

from __future__ import annotations

from typing import Any

from pegainfer.frontend.json_object import JsonObject

# The formats that llguidance enforces; "unknown" is its own name for none.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
# The compiler holds integers in 64 bits and reads them as float64: the first one above -2**63 that fits both.
LEAST_INTEGER = -(2**63) + 1024
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "not", "if", "then", "else", "contains")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas")
_VACUOUS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ({}, True, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": ({}, True),
    "unevaluatedProperties": ({}, True),
}


def prepared(schema: JsonObject, *, closed: bool) -> JsonObject:
    """An equivalent schema, or a tighter one, in keywords of the compiler. The argument stays as it is.

    Args:
        closed: an object with `properties` has no others, where its schema does not say.
    """
    return _prepared(schema, closed, combined=False)


def _prepared(schema: JsonObject, closed: bool, *, combined: bool) -> JsonObject:
    """`combined`: other schemas hold for the same instance, so that this one alone must not close it."""
    out = {k: v for k, v in schema.items() if not _vacuous(schema, k, v)}
    combines = combined or any(key in out for key in _COMBINING)
    _bound_integer(out)
    _name_properties(out)
    if "unevaluatedProperties" in out and not combines and "additionalProperties" not in out:
        out["additionalProperties"] = out.pop("unevaluatedProperties")
    for key, value in out.items():
        if key in _MAPS and isinstance(value, dict):
            out[key] = {name: _nested(inner, closed) for name, inner in value.items()}
        elif key in _LISTS and isinstance(value, list):
            joins = key == "allOf" or (key in ("anyOf", "oneOf") and "properties" in out)
            out[key] = [_nested(inner, closed, combined=joins) for inner in value]
        elif key in _SINGLE:
            out[key] = _nested(value, closed, combined=key in ("not", "if", "then", "else"))
    says = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
    if closed and out.get("properties") and not combines and not any(key in out for key in says):
        out["additionalProperties"] = False
    return out


def _nested(value: Any, closed: bool, *, combined: bool = False) -> Any:
    return _prepared(value, closed, combined=combined) if isinstance(value, dict) else value


def _vacuous(schema: JsonObject, key: str, value: Any) -> bool:
    """Whether every instance satisfies this keyword."""
    if key == "format":
        return value not in FORMATS if isinstance(value, str) else False
    if key in ("minContains", "maxContains"):
        return "contains" not in schema
    if key == "if":
        return "then" not in schema and "else" not in schema
    if key in ("then", "else"):
        return "if" not in schema
    return any(value == v and type(value) is type(v) for v in _VACUOUS.get(key, ()))


def _bound_integer(schema: JsonObject) -> None:
    """Narrows a lower bound of 64 bits by what the compiler cannot hold."""
    for key in ("minimum", "exclusiveMinimum"):
        value = schema.get(key)
        if isinstance(value, int | float) and value < LEAST_INTEGER and "integer" in _types(schema):
            schema[key] = LEAST_INTEGER


def _types(schema: JsonObject) -> list[Any]:
    kind = schema.get("type")
    return kind if isinstance(kind, list) else [kind]


def _name_properties(schema: JsonObject) -> None:
    """Keys of a record, given by an enumeration or a pattern, as properties."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return
    values = schema.get("additionalProperties", {})
    keys = names.keys() - {"type"}
    if keys == {"enum"} and all(isinstance(name, str) for name in names["enum"]):
        schema["properties"] = dict.fromkeys(names["enum"], values)
    elif keys == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: values}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False
