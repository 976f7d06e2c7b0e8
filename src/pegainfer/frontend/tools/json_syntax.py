"""Families that write the arguments of a call as JSON: Hermes and Qwen3, Llama 3, DeepSeek, Kimi, Mistral."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from pegainfer.frontend.tools.call import Tool, ToolCall, call_of, read_object, write_object
from pegainfer.frontend.tools.json_heads import (
    DEEPSEEK_HEAD,
    FIRST_KEY_BEGUN,
    KIMI_HEAD,
    LISTED_HEAD,
    MISTRAL_BEGUN,
    MISTRAL_HEAD,
    OBJECT_BEGUN,
    OBJECT_HEAD,
    head_of,
)
from pegainfer.frontend.tools.syntax import BLANKS, Head, Tail


class Hermes(msgspec.Struct, frozen=True):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>"""

    starts: tuple[str, ...] = ("<tool_call>",)
    end: str | None = "</tool_call>"
    skips: tuple[str, ...] = ()
    leading: bool = False

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        return head_of(
            OBJECT_HEAD.match(body), tools, Tail("}" + BLANKS, self.end, resume=self.end), within=True
        )

    def possible(self, start: str, body: str) -> bool:
        return FIRST_KEY_BEGUN.match(body) is not None

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        call = call_of(read_object(body))
        return None if call is None else [call]

    def unfinished(self, body: str) -> bool:
        return ends_in_string(body)

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return cut_off(body)


class LlamaJson(msgspec.Struct, frozen=True):
    """{"name": …, "parameters": {…}}, several with semicolons between, as the whole answer."""

    starts: tuple[str, ...] = ("<|python_tag|>", "{")
    end: str | None = None
    skips: tuple[str, ...] = ()
    leading: bool = True

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        brace = "{" if start == "{" else ""
        return head_of(
            OBJECT_HEAD.match(brace + body),
            tools,
            Tail("}" + BLANKS, more=";"),
            within=True,
            before=len(brace),
        )

    def possible(self, start: str, body: str) -> bool:
        return OBJECT_BEGUN.match(("{" if start == "{" else "") + body) is not None

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        calls, rest = leading_calls(("{" if start == "{" else "") + body, tools, between=";")
        return calls if calls and not rest else None

    def unfinished(self, body: str) -> bool:
        return False

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        calls, rest = leading_calls(("{" if start == "{" else "") + body, tools, between=";")
        return calls + [call for call in cut_off(rest) if any(tool.name == call.name for tool in tools)]


class DeepSeek(msgspec.Struct, frozen=True):
    """<｜tool▁call▁begin｜>…<｜tool▁call▁end｜>

    Between them: in V3 `function<｜tool▁sep｜>NAME` and a JSON code block, in V3.1 `NAME<｜tool▁sep｜>{…}`.
    """

    starts: tuple[str, ...] = ("<｜tool▁call▁begin｜>",)
    end: str | None = "<｜tool▁call▁end｜>"
    skips: tuple[str, ...] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    leading: bool = False

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        return head_of(DEEPSEEK_HEAD.match(body), tools, Tail("`" + BLANKS, self.end, resume=self.end))

    def possible(self, start: str, body: str) -> bool:
        return True

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        name, arguments = self._parts(body)
        found = read_object(arguments.rstrip().removesuffix("```"))
        return one(name, found)

    def unfinished(self, body: str) -> bool:
        return ends_in_string(self._parts(body)[1])

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        name, arguments = self._parts(body)
        # Before the brace it cannot be told V3's `function` from a name of V3.1.
        return [ToolCall(name, begun(arguments))] if name and arguments.lstrip().startswith("{") else []

    @staticmethod
    def _parts(body: str) -> tuple[str, str]:
        head, _, tail = body.partition("<｜tool▁sep｜>")
        name, fence, arguments = tail.partition("\n```json\n")
        if fence:
            return name.strip(), arguments
        return head.strip(), tail


class Kimi(msgspec.Struct, frozen=True):
    """<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>"""

    starts: tuple[str, ...] = ("<|tool_call_begin|>",)
    end: str | None = "<|tool_call_end|>"
    skips: tuple[str, ...] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    leading: bool = False

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        return head_of(KIMI_HEAD.match(body), tools, Tail(BLANKS, self.end, resume=self.end))

    def possible(self, start: str, body: str) -> bool:
        return True

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        return one(self._name(id), read_object(arguments), id.strip())

    def unfinished(self, body: str) -> bool:
        return ends_in_string(body.partition("<|tool_call_argument_begin|>")[2])

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        id, marker, arguments = body.partition("<|tool_call_argument_begin|>")
        return [ToolCall(self._name(id), begun(arguments), id.strip())] if marker else []

    @staticmethod
    def _name(id: str) -> str:
        return id.strip().rpartition(":")[0].removeprefix("functions.") or id.strip()


class Mistral(msgspec.Struct, frozen=True):
    """[TOOL_CALLS][{"name": …, "arguments": {…}}, …], since version 11 [TOOL_CALLS]NAME[ARGS]{…} a call."""

    starts: tuple[str, ...] = ("[TOOL_CALLS]",)
    end: str | None = None
    skips: tuple[str, ...] = ()
    leading: bool = False

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        bracket = "" if start else "["  # a further call of a list
        listed = LISTED_HEAD.match(bracket + body)
        if listed is not None:
            return head_of(listed, tools, Tail("}" + BLANKS, "]", ","), within=True, before=len(bracket))
        return head_of(MISTRAL_HEAD.match(body), tools, Tail("", resume=self.starts[0])) if start else None

    def possible(self, start: str, body: str) -> bool:
        return MISTRAL_BEGUN.match(body if start else "[" + body) is not None

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        body = body if start else "[" + body
        decoder = json.JSONDecoder()
        calls: list[ToolCall | None] = []
        at = 0
        try:
            if body.lstrip().startswith("["):
                values, _ = decoder.raw_decode(body.lstrip())
                calls = [call_of(value) for value in values]
            else:
                while body[at:].strip():
                    head = MISTRAL_HEAD.match(body, at)
                    if head is None:
                        return None
                    value, at = decoder.raw_decode(body, head.end())
                    calls += one(head["name"], value if isinstance(value, dict) else None) or [None]
        except (ValueError, RecursionError):
            return None
        found = [c for c in calls if c is not None]
        return found if found and len(found) == len(calls) else None

    def unfinished(self, body: str) -> bool:
        return False

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        body = body if start else "[" + body
        if body.lstrip().startswith("["):
            calls, rest = leading_calls(body.lstrip()[1:], tools, between=",")
            return calls + cut_off(rest)
        at = 0
        while head := MISTRAL_HEAD.match(body, at):
            arguments = begun(body[head.end() :])
            calls.append(ToolCall(head["name"], arguments))
            at = head.end() + len(arguments)
        return calls


_NAME = re.compile(r'"name"\s*:\s*"(?P<name>[^"\\]+)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def one(name: str, arguments: object, id: str | None = None) -> list[ToolCall] | None:
    """A call of these parts, None where one is missing."""
    if not name or not isinstance(arguments, dict):
        return None
    text = write_object(arguments)
    return None if text is None else [ToolCall(name, text, id)]


def ends_in_string(text: str) -> bool:
    """Whether JSON text breaks off within a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def leading_calls(text: str, tools: Sequence[Tool], *, between: str) -> tuple[list[ToolCall], str]:
    """The calls that a text begins with, JSON objects with `between` between them, and what follows those.

    An object with a name is a call where it has arguments, or where the name is a tool's: an answer in a JSON
    format may have a name, too.
    """
    names = {tool.name for tool in tools}
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    gap = between + BLANKS
    text = text.lstrip(gap)
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            break
        call = call_of(value)
        if call is None or not (call.name in names or value.keys() & {"arguments", "parameters"}):
            break
        calls.append(call)
        text = text[end:].lstrip(gap)
    return calls, text


def cut_off(body: str) -> list[ToolCall]:
    """The name and as much of the arguments as there is, of one JSON object that was cut off."""
    name, arguments = _NAME.search(body), _ARGUMENTS.search(body)
    if name is None or arguments is None:
        return []
    return [ToolCall(name["name"], begun(body[arguments.end() :]))]


def begun(arguments: str) -> str:
    """As much as there is of the arguments; where they are whole, nothing of what came after them."""
    arguments = arguments.lstrip(BLANKS)
    try:
        _, end = json.JSONDecoder().raw_decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return arguments[:end]
