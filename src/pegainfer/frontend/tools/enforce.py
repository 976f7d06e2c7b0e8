"""Grammars under which a model can only write calls of the offered tools, in its own family's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from pegainfer.frontend.grammar.compiler import json_options
from pegainfer.frontend.grammar.schema import prepared
from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.reasoning.think import ThinkState, ThinkSyntax
from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.values import is_text

ANY_TEXT = "TEXT"  # a body that every text obeys
MAX_CALLS = 32  # in one answer; without a bound a small model might call for ever


class Frame(msgspec.Struct, frozen=True):
    """What stands around calls and around their arguments. {name} and {key} are filled in.

    No part may be the beginning of another that could stand in its place: a lexer takes the longest.

    field: around one argument where they are written one by one: before and after it, for strings as they are
    and for JSON. None: the arguments are one JSON object.
    """

    begin: str
    end: str
    open: str = ""
    between: str = ""
    close: str = ""
    number: str = ""  # between `begin` and the arguments, after a running number
    fields: tuple[str, str, str, str] | None = None
    comma: str = ""  # between two arguments written one by one
    quotes_text: bool = False  # strings are written as JSON, too


FRAMES: Mapping[str, Frame] = {
    "hermes": Frame('<tool_call>\n{{"name": "{name}", "arguments": ', "}}\n</tool_call>", between="\n"),
    "llama3_json": Frame('{{"name": "{name}", "parameters": ', "}}", between="; "),
    "mistral": Frame(
        '{{"name": "{name}", "arguments": ', "}}", open="[TOOL_CALLS][", between=", ", close="]"
    ),
    "mistral_v11": Frame("[TOOL_CALLS]{name}[ARGS]", ""),
    "deepseek_v3": Frame(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        open="<｜tool▁calls▁begin｜>",
        between="\n",
        close="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Frame(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": Frame(
        "<|tool_call_begin|>functions.{name}:",
        "<|tool_call_end|>",
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        number="<|tool_call_argument_begin|>",
    ),
    "qwen3_coder": Frame(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        between="\n",
        fields=("<parameter={key}>\n", "\n</parameter>\n", "<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "pythonic": Frame(
        "{name}(", ")", open="[", between=", ", close="]", fields=("", "", "{key}=", ""), comma=", ",
        quotes_text=True,
    ),
}  # fmt: skip
for _name, _block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
    FRAMES = {
        **FRAMES,
        _name: Frame(
            '<｜DSML｜invoke name="{name}">\n',
            "</｜DSML｜invoke>\n",
            open=f"<｜DSML｜{_block}>\n",
            close=f"</｜DSML｜{_block}>",
            fields=(
                '<｜DSML｜parameter name="{key}" string="true">',
                "</｜DSML｜parameter>\n",
                '<｜DSML｜parameter name="{key}" string="false">',
                "</｜DSML｜parameter>\n",
            ),
        ),
    }


def split_markers(text: str) -> list[str]:
    """A text in parts, each of what may be one special token by itself."""
    return _MARKER.split(text)


class Lark(msgspec.Struct):
    """A grammar under construction.

    special: the id of a special token by its name; such a token is no text to a grammar, so a marker that is
    one must be asked for by its id.
    """

    special: Callable[[str], int | None]
    open_objects: bool = False
    rules: list[str] = msgspec.field(default_factory=list)
    _count: int = 0

    def rule(self, body: str, *, attribute: str = "") -> str:
        """Adds a rule and returns its name."""
        self._count += 1
        name = f"r{self._count}"
        self.rules.append(f"{name}[{attribute}]: {body}" if attribute else f"{name}: {body}")
        return name

    def text(self, text: str) -> str:
        """A literal, special tokens in it by their ids."""
        parts: list[str] = []
        plain = ""
        for part in split_markers(text):
            token = self.special(part) if part else None
            if token is None:
                plain += part
                continue
            parts += [json.dumps(plain), f"<[{token}]>"] if plain else [f"<[{token}]>"]
            plain = ""
        return " ".join([*parts, json.dumps(plain)] if plain else parts)

    def json(self, schema: JsonObject) -> str:
        return "%json " + json.dumps(
            {**prepared(schema, closed=not self.open_objects), "x-guidance": json_options()}
        )

    def until(self, end: str) -> str:
        """Any text up to the first `end`, which is part of it."""
        literal = self.text(end)
        if literal.startswith("<["):
            return self.rule(f"TEXT {literal}")
        return self.rule(f"TEXT {literal}", attribute="lazy")

    def source(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules, r"TEXT: /(.|\n)*/", ""])


# What may be one special token: <…>, […] with word characters and the bars of several families.
_MARKER = re.compile(r"(<[^<>\n ]+>|\[[A-Z_]+\])")


def calls_only(lark: Lark, frame: Frame, tools: Sequence[Tool], *, single: bool) -> str:
    """The rule of an answer that is at least one call and nothing else."""
    call = lark.rule(" | ".join(_call(lark, frame, tool) for tool in tools))
    more = f"({lark.text(frame.between)} {call}){{0,{MAX_CALLS - 1}}}"
    parts = [lark.text(frame.open), call, "" if single else more, lark.text(frame.close)]
    return lark.rule(" ".join(p for p in parts if p))


def calls_or_text(lark: Lark, frame: Frame, tools: Sequence[Tool], *, single: bool, leading: bool) -> str:
    """The rule of an answer that may be anything, but whose calls obey their tools' schemas."""
    loose = _loose(tools)
    if leading:
        lark.rules.append(r"FREE: /[^\[{< \t\r\n](.|\n)*/")
        return lark.rule(f"{calls_only(lark, frame, loose, single=single)} | FREE")
    marker = frame.open or frame.begin.split("{", 1)[0]
    opened = lark.until(marker)
    rest = _without(lark, frame, loose, marker, single=single)
    return lark.rule(f"({opened} {rest})? TEXT")


def _without(lark: Lark, frame: Frame, tools: Sequence[Tool], marker: str, *, single: bool) -> str:
    """Calls whose first marker has been read."""
    if frame.open:
        shorter = replace(frame, open="")
        return calls_only(lark, shorter, tools, single=single)
    first = replace(frame, begin=frame.begin.removeprefix(marker))
    call = lark.rule(" | ".join(_call(lark, first, tool) for tool in tools))
    if single:
        return call
    following = lark.rule(" | ".join(_call(lark, frame, tool) for tool in tools))
    return lark.rule(f"{call} ({lark.text(frame.between)} {following}){{0,{MAX_CALLS - 1}}}")


def calls_or_answer(lark: Lark, frame: Frame, tools: Sequence[Tool], *, single: bool) -> str:
    """The rule of an answer that is calls alone, or obeys the grammar that is referred to as @body."""
    loose = _loose(tools)
    if frame.begin.startswith("{{"):
        return lark.rule(" | ".join([*(_call_as_json(lark, tool) for tool in loose), "@body"]))
    return lark.rule(f"{calls_only(lark, frame, loose, single=single)} | @body")


def _call_as_json(lark: Lark, tool: Tool) -> str:
    """One call in Llama's form by a schema.

    A literal beginning would be one lexeme, whose start an answer in JSON shares; the lexer does not go back.
    """
    parameters = dict(tool.parameters)
    shared: JsonObject = {key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters}
    properties = {"name": {"const": tool.name}, "parameters": parameters}
    return lark.json(
        {
            **shared,
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    )


def _loose(tools: Sequence[Tool]) -> list[Tool]:
    """Tools of which only the strict ones keep their schema."""
    return [tool if tool.strict else Tool(tool.name, {"type": "object"}) for tool in tools]


class ThinkBudget(msgspec.Struct, frozen=True):
    """tokens: that the model may think before `end` is the only token it may draw.

    start, end: ids of the markers; a text would not do, for thoughts themselves may spell one that is cut.
    """

    tokens: int
    start: int
    end: int


def after_thinking(
    lark: Lark, thoughts: ThinkSyntax, state: ThinkState, body: str, budget: ThinkBudget | None = None
) -> str:
    """The start of a grammar whose `body` comes after what the model thinks."""
    if state is ThinkState.CLOSED:
        return body
    if budget is None:
        start, end = lark.text(thoughts.start), lark.until(thoughts.end)
    else:
        lark.rules.append(f"THOUGHT: {_all_but(thoughts.end)}")
        start = f"<[{budget.start}]>"
        end = f"{lark.rule('THOUGHT', attribute=f'max_tokens={budget.tokens}')} <[{budget.end}]>"
    closed = end if body == ANY_TEXT else f"{end} /[ \\n]{{0,4}}/"
    if state is ThinkState.OPEN:
        return f"{closed} {body}"
    return f"({start} {closed})? {body}"


def _all_but(text: str) -> str:
    """A terminal of every text that does not hold this one."""
    literal = re.escape(text).replace("/", "\\/")
    return rf"/(.|\n)*/ & ~/(.|\n)*{literal}(.|\n)*/"


def _call(lark: Lark, frame: Frame, tool: Tool) -> str:
    """The rule of one call of one tool."""
    parts = [lark.text(frame.begin.format(name=tool.name))]
    if frame.number:
        parts += ["/[0-9]{1,3}/", lark.text(frame.number)]
    if frame.fields is None:
        parts.append(lark.json(tool.parameters))
    else:
        parts.append(_fields(lark, frame, tool))
    parts.append(lark.text(frame.end.format(name=tool.name)))
    return lark.rule(" ".join(p for p in parts if p))


def _fields(lark: Lark, frame: Frame, tool: Tool) -> str:
    """Arguments one by one: the required ones in the order of the schema, then any of the others."""
    properties = tool.parameters.get("properties") or {}
    required = [k for k in properties if k in (tool.parameters.get("required") or ())]
    optional = [k for k in properties if k not in required]
    rules = {key: _field(lark, frame, tool, key) for key in properties}
    comma = lark.text(frame.comma)
    if not comma:
        return " ".join([*(rules[k] for k in required), *(f"{rules[k]}?" for k in optional)])
    if not required:  # a comma needs something before it
        return f"({' | '.join(rules[k] for k in optional)})?" if optional else ""
    more = [f"({comma} {rules[k]})?" for k in optional]
    return " ".join([f" {comma} ".join(rules[k] for k in required), *more])


def _field(lark: Lark, frame: Frame, tool: Tool, key: str) -> str:
    assert frame.fields is not None
    schema = tool.property_schema(key)
    if is_text(schema) and not frame.quotes_text:
        before, after, _, _ = frame.fields
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        opening = lark.text(before.format(key=key))
        if values is None:
            return lark.rule(f"{opening} {lark.until(after)}")
        choices = " | ".join(json.dumps(v) for v in values)
        return lark.rule(f"{opening} ({choices}) {lark.text(after)}")
    _, _, before, after = frame.fields
    whole: dict[str, Any] = {k: tool.parameters[k] for k in ("$defs", "definitions") if k in tool.parameters}
    value = lark.json({**whole, **schema})
    return lark.rule(f"{lark.text(before.format(key=key))} {value} {lark.text(after)}".strip())
