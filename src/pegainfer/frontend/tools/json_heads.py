"""How calls with a JSON object as arguments begin; what begins so is a call whatever follows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.json_stream import JsonStream
from pegainfer.frontend.tools.syntax import Head, Tail

# Heads of calls whose arguments are a JSON object: each ends before the object's brace.
OBJECT_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\<]*"\s*,\s*)*'
    r'"name"\s*:\s*"(?P<name>[^"\\<]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LISTED_HEAD = re.compile(r"\s*\[" + OBJECT_HEAD.pattern)
# As much of an object as tells that it may be a call, by its first key.
FIRST_KEY_BEGUN = re.compile(r'\s*(?:\Z|\{\s*(?:\Z|"))')
OBJECT_BEGUN = re.compile(r'\s*(?:\Z|\{\s*(?:\Z|"(?:name|type|id|arguments|parameters)"|"[a-z]{0,9}\Z))')
DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>(?P<named>[^<\n]+)\n```json\n\s*|(?P<name>[^<\n]+)<｜tool▁sep｜>\s*)(?=\{)"
)
KIMI_HEAD = re.compile(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^<:\s]+):\w+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
MISTRAL_HEAD = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)"
)
MISTRAL_BEGUN = re.compile(r"\s*(?:\Z|[\w.-]+\s*(?:\Z|[\[{])|\[\s*(?:\Z|\{|T))")


def head_of(
    found: re.Match[str] | None, tools: Sequence[Tool], tail: Tail, *, within: bool = False, before: int = 0
) -> Head | None:
    """The head that a pattern has found, if it names an offered tool.

    Args:
        within: the arguments are a member of the object that the head begins with.
        before: characters that stand before the section's body in the text that was matched.
    """
    groups = {} if found is None else found.groupdict()
    name = (groups.get("named") or groups.get("name") or "").strip()
    if found is None or not any(tool.name == name for tool in tools):
        return None
    return Head(name, groups.get("id"), found.end() - before, JsonStream(within=within), tail)
