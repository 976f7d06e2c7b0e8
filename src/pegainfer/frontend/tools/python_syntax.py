"""Calls written as Python: Llama 4's list of calls with keywords."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import msgspec

from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.json_syntax import one
from pegainfer.frontend.tools.python_stream import MAX_PYTHON_CHARS, PythonStream
from pegainfer.frontend.tools.python_values import function, keywords
from pegainfer.frontend.tools.syntax import BLANKS, Head, Tail


class Pythonic(msgspec.Struct, frozen=True):
    """[f(a=1, b="x"), g()], as the whole answer; literals of Python, and JSON's true, false and null."""

    starts: tuple[str, ...] = ("<|python_start|>", "[")
    end: str | None = None
    skips: tuple[str, ...] = ("<|python_end|>",)
    leading: bool = True

    def head(self, start: str, body: str, tools: Sequence[Tool]) -> Head | None:
        bracket = "" if start == self.starts[0] else "["
        found = _PYTHON_HEAD.match(bracket + body)
        if found is None or not any(tool.name == found["name"] for tool in tools):
            return None
        return Head(found["name"], None, found.end() - len(bracket), PythonStream(), Tail(BLANKS, "]", ","))

    def possible(self, start: str, body: str) -> bool:
        return _PYTHON_BEGUN.match(("" if start == self.starts[0] else "[") + body) is not None

    def read(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall] | None:
        text = (
            (("" if start == self.starts[0] else "[") + body).strip().removesuffix("<|python_end|>").strip()
        )
        if len(text) > MAX_PYTHON_CHARS:
            return None
        try:
            tree = ast.parse(text, mode="eval").body
            nodes = tree.elts if isinstance(tree, ast.List) else []
            calls = [one(function(node), keywords(node)) for node in nodes]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        found = [call[0] for call in calls if call is not None]
        return found if found and len(found) == len(calls) else None

    def unfinished(self, body: str) -> bool:
        return False

    def rest(self, start: str, body: str, tools: Sequence[Tool]) -> list[ToolCall]:
        return []


_PYTHON_HEAD = re.compile(
    r"\s*\[\s*(?P<name>[A-Za-z_][\w.]*)\s*\(\s*(?=\)\s*[,\]]|[A-Za-z_]\w*\s*=\s*[^=\s])"
)
_PYTHON_BEGUN = re.compile(
    r"\s*(?:\Z|\[\s*(?:\Z|[A-Za-z_][\w.]*\s*(?:\Z|\(\s*(?:\Z|\)|[A-Za-z_]\w*\s*(?:\Z|=)))))"
)
