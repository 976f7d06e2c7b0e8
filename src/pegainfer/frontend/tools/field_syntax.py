"""Families that write arguments one by one: Qwen3-Coder's XML, DeepSeek's DSML, Python calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.json_syntax import one

MAX_PYTHON_CHARS = 1 << 16  # a longer list of calls is taken for text: the parser's stack is not ours


@dataclass(frozen=True)
class QwenCoder:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>"""

    starts: tuple[str, ...] = ("<function=",)
    end: str | None = "</function>"
    skips: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    leading: bool = False

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        name, closed, rest = body.partition(">")
        if not closed:
            return None
        tool = tool_of(name.strip(), tools)
        found: JsonObject = {}
        for m in _QWEN_FIELD.finditer(rest):
            found[m["key"]] = typed(_unframed(m["value"]), tool.property_schema(m["key"]))
        return None if _QWEN_FIELD.sub("", rest).strip() else one(name.strip(), found)

    def unfinished(self, body: str) -> bool:
        return body.rfind("<parameter=") > body.rfind("</parameter>")

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        name, closed, rest = body.partition(">")
        whole = "".join(m[0] for m in _QWEN_FIELD.finditer(rest))
        return (self.read(start, f"{name}>{whole}", tools) or []) if closed else []


_QWEN_FIELD = re.compile(r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>", re.DOTALL)


def _unframed(value: str) -> str:
    """Without the line breaks that the format puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class Dsml:
    """<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>…

    DeepSeek V3.2 puts function_calls around the invocations, V4 tool_calls.
    """

    starts: tuple[str, ...] = ('<｜DSML｜invoke name="',)
    end: str | None = "</｜DSML｜invoke>"
    skips: tuple[str, ...] = (
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
    )
    leading: bool = False

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        name, closed, rest = body.partition('">')
        if not closed or _DSML_FIELD.sub("", rest).strip():
            return None
        found: JsonObject = {}
        for m in _DSML_FIELD.finditer(rest):
            found[m["key"]] = m["value"] if m["string"] == "true" else typed(m["value"], {})
        return one(name.strip(), found)

    def unfinished(self, body: str) -> bool:
        return body.rfind("<｜DSML｜parameter") > body.rfind("</｜DSML｜parameter>")

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        name, closed, rest = body.partition('">')
        whole = "".join(m[0] for m in _DSML_FIELD.finditer(rest))
        return (self.read(start, f'{name}">{whole}', tools) or []) if closed else []


_DSML_FIELD = re.compile(
    r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>",
    re.DOTALL,
)


@dataclass(frozen=True)
class Pythonic:
    """[f(a=1, b="x"), g()], as the whole answer; literals of Python, and JSON's true, false and null."""

    starts: tuple[str, ...] = ("<|python_start|>", "[")
    end: str | None = None
    skips: tuple[str, ...] = ()
    leading: bool = True

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        text = (("[" if start == "[" else "") + body).strip().removesuffix("<|python_end|>").strip()
        if len(text) > MAX_PYTHON_CHARS:
            return None
        try:
            tree = ast.parse(text, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else []
            calls = [one(_function(node), _keywords(node)) for node in nodes]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        found = [call[0] for call in calls if call is not None]
        return found if found and len(found) == len(calls) else None

    def unfinished(self, body: str) -> bool:
        return False

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return []


def _function(node: ast.expr) -> str:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords")
    return ast.unparse(node.func)


def _keywords(node: ast.expr) -> JsonObject:
    assert isinstance(node, ast.Call)
    return {keyword.arg or _refuse(): _literal(keyword.value) for keyword in node.keywords}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List() | ast.Tuple():
            return [_literal(item) for item in node.elts]
        case ast.Dict():
            return {_key(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
        case _:
            return _refuse()


def _key(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else _refuse()


def _refuse() -> Any:
    raise ValueError("not a literal")


def tool_of(name: str, tools: Sequence[Tool]) -> Tool:
    """The tool of this name; one without a schema where there is none."""
    return next((t for t in tools if t.name == name), Tool(name, {}))


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
        return json.loads(text, parse_constant=lambda c: _refuse())
    except (ValueError, RecursionError):
        word = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(word, text)
