"""Families that write arguments one by one between tags: Qwen3-Coder's and Qwen3.5's XML, DeepSeek's DSML."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.field_stream import Field, FieldStream, Tags
from pegainfer.frontend.tools.json_syntax import one
from pegainfer.frontend.tools.syntax import Head, Tail
from pegainfer.frontend.tools.values import is_text, typed


class QwenCoder(msgspec.Struct, frozen=True):
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>"""

    starts: tuple[str, ...] = ("<function=",)
    end: str | None = "</function>"
    skips: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    leading: bool = False

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        return _head(_QWEN_HEAD.match(body), tools, _QWEN_TAGS)

    def possible(self, start: str, body: str) -> bool:
        return _QWEN_BEGUN.match(body) is not None

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


_QWEN_FIELD = re.compile(r"<parameter=(?P<key>[^<>\n]+)>(?P<value>.*?)</parameter>", re.DOTALL)
_QWEN_HEAD = re.compile(r"(?P<name>[^<>\n]+)>\s*(?=<parameter=|</function>)")
_QWEN_BEGUN = re.compile(r"[^<>\n]+(?:\Z|>\s*(?:\Z|<))|\Z")


def _qwen_field(found: re.Match[str], tool: Tool) -> Field:
    return Field(found["key"], is_text(tool.property_schema(found["key"])))


_QWEN_TAGS = Tags(
    opening=re.compile(r"<parameter=(?P<key>[^<>\n]+)>"),
    opened=_qwen_field,
    closing="</parameter>",
    end="</function>",
    line_breaks=True,
    by_schema=True,
)


def _unframed(value: str) -> str:
    """Without the line breaks that the format puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")


class Dsml(msgspec.Struct, frozen=True):
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

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        return _head(_DSML_HEAD.match(body), tools, _DSML_TAGS)

    def possible(self, start: str, body: str) -> bool:
        return _DSML_BEGUN.match(body) is not None

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
    r'<｜DSML｜parameter name="(?P<key>[^"<]+)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>",
    re.DOTALL,
)
_DSML_HEAD = re.compile(r'(?P<name>[^"<>\n]+)">\s*(?=<｜DSML｜parameter|</｜DSML｜invoke>)')
_DSML_BEGUN = re.compile(r'[^"<>\n]+(?:\Z|"(?:\Z|>\s*(?:\Z|<)))|\Z')
_DSML_TAGS = Tags(
    opening=re.compile(r'<｜DSML｜parameter name="(?P<key>[^"<]+)" string="(?P<string>true|false)">'),
    opened=lambda found, tool: Field(found["key"], found["string"] == "true"),
    closing="</｜DSML｜parameter>",
    end="</｜DSML｜invoke>",
    line_breaks=False,
    by_schema=False,
)


def _head(found: re.Match[str] | None, tools: Sequence[Tool], tags: Tags) -> Head | None:
    """The head that a pattern has found, if it names an offered tool."""
    tool = next((t for t in tools if found and t.name == found["name"].strip()), None)
    if found is None or tool is None:
        return None
    return Head(tool.name, None, found.end(), FieldStream(tags, tool), Tail(""))


def tool_of(name: str, tools: Sequence[Tool]) -> Tool:
    """The tool of this name; one without a schema where there is none."""
    return next((t for t in tools if t.name == name), Tool(name, {}))
