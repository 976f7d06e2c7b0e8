"""Tools of the responses API as a chat has them, and back: functions, alone or in namespaces.

The model knows a function of a namespace as `namespace__name`; answers and histories keep the two apart.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.neutral import refuse_unserved
from pegainfer.frontend.http.request.tools import FunctionParam, NamedFunction, NamedTool, ToolParam
from pegainfer.frontend.json_object import JsonObject

SEPARATOR = "__"
_TYPE = re.compile(r"tools\[\d+\](\.tools\[\d+\])?\.type")


class FunctionTool(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # absent: the arguments are enforced only where a call is
    # Known of OpenAI's API and not served, see GenerateFields.
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


class NamespaceTool(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="namespace"
):
    name: str
    description: str | None = None
    tools: list[FunctionTool]


ResponsesTool = FunctionTool | NamespaceTool


class ResponsesChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None


@contextlib.contextmanager
def explaining_tools() -> Iterator[None]:
    """An error about a tool's type says what there is: agents offer what runs on others' servers unasked."""
    try:
        yield
    except ApiError as error:
        if error.param is None or not _TYPE.fullmatch(error.param):
            raise
        got = error.message.removeprefix(error.param + ": ")
        expected = "function or namespace (no other tools are offered here; leave it out)"
        raise ApiError(
            400, f"{error.param}: expected {expected}; {got}", param=error.param, code="unsupported"
        ) from None


def model_name(namespace: str | None, name: str) -> str:
    """What the model calls a function."""
    return name if namespace is None else namespace.removesuffix(SEPARATOR) + SEPARATOR + name


def chat_tools(tools: Sequence[ResponsesTool] | None) -> list[ToolParam] | None:
    """Raises ApiError (400)."""
    if tools is None:
        return None
    out: list[ToolParam] = []
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            out.append(_function(tool, f"tools[{i}]", None))
            continue
        for j, inner in enumerate(tool.tools):
            out.append(_function(inner, f"tools[{i}].tools[{j}]", tool.name))
    return out


def _function(tool: FunctionTool, where: str, namespace: str | None) -> ToolParam:
    refuse_unserved(tool, where + ".")
    function = FunctionParam(
        name=model_name(namespace, tool.name),
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return ToolParam(type="function", function=function)


def namespaces(tools: Sequence[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """For what the model calls a function of a namespace: the namespace and the function's own name."""
    found: dict[str, tuple[str, str]] = {}
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            found |= {model_name(tool.name, inner.name): (tool.name, inner.name) for inner in tool.tools}
    return found


def called(name: str, known: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """The name and, where it has one, the namespace of a function that the model has called."""
    if name not in known:
        return {"name": name}
    namespace, own = known[name]
    return {"name": own, "namespace": namespace}


def chat_choice(choice: str | ResponsesChoice | None) -> str | NamedTool | None:
    """Raises ApiError (400)."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type != "function" or choice.name is None:
        raise bad_value("tool_choice", "none, auto, required, or type function with a name", choice.type[:40])
    return NamedTool(function=NamedFunction(name=choice.name))
