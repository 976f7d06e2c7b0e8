"""Python literals as JSON values."""

from __future__ import annotations

import ast
import re
from typing import Any

from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import whole_characters

_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_SIMPLE |= {c: c for c in "\\'\""}
_HALF = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_PAIR = re.compile(_HALF + r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_AT_END = re.compile(_HALF + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_OCTAL = re.compile(r"\\([0-7]{1,3})")
_INCOMPLETE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?\Z")


def literal(node: ast.expr) -> Any:
    """The value of a literal; JSON's true, false and null are taken, too. Raises ValueError for others."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List() | ast.Tuple():
            return [literal(item) for item in node.elts]
        case ast.Dict():
            return {_key(k): literal(v) for k, v in zip(node.keys, node.values, strict=True)}
        case _:
            return _refuse()


def function(node: ast.expr) -> str:
    """The name of a call that has keywords only. Raises ValueError for others."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords")
    return ast.unparse(node.func)


def keywords(node: ast.expr) -> JsonObject:
    """The arguments of a call. Raises ValueError where one is no literal."""
    assert isinstance(node, ast.Call)
    return {keyword.arg or _refuse(): literal(keyword.value) for keyword in node.keywords}


def escape(text: str) -> tuple[int, str] | None:
    """The escape that a string's rest begins with: its length and meaning; (0, "") for half of one.

    None for what Python refuses, and for names of characters.
    """
    if _INCOMPLETE.match(text) or _HALF_AT_END.match(text):
        return 0, ""
    if pair := _PAIR.match(text):
        return pair.end(), whole_characters(chr(int(text[2:6], 16)) + chr(int(text[8:12], 16)))
    if found := _CODE.match(text):
        code = int(found[1] or found[2] or found[3], 16)
        return (found.end(), whole_characters(chr(code))) if code < 0x110000 else None
    if found := _OCTAL.match(text):
        return found.end(), chr(int(found[1], 8))
    if text[1] in "xuUN":
        return None
    return 2, _SIMPLE.get(text[1], text[:2])


def _key(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _refuse()


def _refuse() -> Any:
    raise ValueError("not a literal")
