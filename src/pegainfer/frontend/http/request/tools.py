"""`tools`, `tool_choice` and `parallel_tool_calls`: checked, and the grammar that they ask for."""

from __future__ import annotations

import re
from typing import Any, Literal, Protocol

import msgspec

from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.formats import Formatted, grammar_job
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.json_object import JsonObject
from pegainfer.frontend.reasoning.think import ThinkState
from pegainfer.frontend.tools.call import NO_PARAMETERS, Tool
from pegainfer.frontend.tools.enforce import (
    ANY_TEXT,
    Lark,
    ThinkBudget,
    after_thinking,
    calls_only,
    calls_or_answer,
    calls_or_text,
)

MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class FunctionParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    function: FunctionParam


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str = "function"
    function: NamedFunction


class WithTools(Formatted, Protocol):
    @property
    def tools(self) -> list[ToolParam] | None: ...
    @property
    def tool_choice(self) -> str | NamedTool | None: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...


class ToolPlan(msgspec.Struct, frozen=True):
    """What a request offers and how free the model is to use it."""

    shown: tuple[JsonObject, ...] = ()  # what the template sees, as the request has them
    tools: tuple[Tool, ...] = ()  # those that may be called
    mode: Literal["none", "auto", "required"] = "none"
    single: bool = False  # at most one call


def tool_plan(r: WithTools) -> ToolPlan:
    """Raises ApiError (400)."""
    choice = r.tool_choice
    if not r.tools:
        if choice not in (None, "none", "auto"):
            raise bad_value("tool_choice", "tools beside it", "none")
        return ToolPlan()
    tools, shown = _tools(r.tools), shown_tools(r.tools)
    single = r.parallel_tool_calls is False
    if choice is None or choice == "auto":
        return ToolPlan(shown, tools, "auto", single)
    if choice == "none":
        return ToolPlan()
    if choice == "required":
        return ToolPlan(shown, tools, "required", single)
    if isinstance(choice, str) or choice.type != "function":
        got = choice if isinstance(choice, str) else choice.type
        raise bad_value("tool_choice", "none, auto, required or a function's name as an object", repr(got))
    named = tuple(tool for tool in tools if tool.name == choice.function.name)
    if not named:
        raise bad_value("tool_choice.function.name", "one of the tools", repr(choice.function.name[:128]))
    return ToolPlan(shown, named, "required", True)


def shown_tools(tools: list[ToolParam] | None) -> tuple[JsonObject, ...]:
    """Tools as the template sees them. Raises ApiError (400) for faulty ones."""
    _tools(tools or [])
    return tuple(_shown(tool) for tool in tools or ())


def _tools(tools: list[ToolParam]) -> tuple[Tool, ...]:
    at_most("tools", len(tools), MAX_TOOLS, "tools")
    out = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in out]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise bad_value("tools", "each name once", repr(twice))
    return out


def _tool(tool: ToolParam, where: str) -> Tool:
    if tool.type != "function":
        raise bad_value(f"{where}.type", "function", repr(tool.type))
    function = tool.function
    if not NAME.fullmatch(function.name):
        got = repr(function.name[:200])
        raise bad_value(f"{where}.function.name", "1 to 128 letters, digits, _, . and -", got)
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    if parameters.get("type", "object") != "object" or "x-guidance" in parameters:
        raise bad_value(f"{where}.function.parameters", "a JSON schema of an object", "another")
    return Tool(function.name, {**parameters, "type": "object"}, strict=bool(function.strict))


def _shown(tool: ToolParam) -> JsonObject:
    """A tool as the request has it, but for `strict`, which is not the model's affair."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


def output_job(
    front: Front, r: WithTools, plan: ToolPlan, state: ThinkState, budget: ThinkBudget | None = None
) -> tuple[str, GrammarJob] | None:
    """The field at work and the grammar of the whole output; None where it is free. Raises ApiError (400).

    With tools and a format the model may call, or answer in the format. Where it must call, it only calls.
    A budget bounds the thoughts before either.
    """
    budget = None if state is ThinkState.CLOSED else budget
    wanted = grammar_job(r, front.config.max_grammar_bytes, open_objects=front.config.open_objects)
    lark = Lark(front.special_id, front.config.open_objects)
    frame, single = front.style.frame, plan.single
    strict = any(tool.strict for tool in plan.tools)
    if wanted is not None and plan.mode != "required":
        if plan.mode == "none" and (front.reasoning is None or state is ThinkState.CLOSED):
            return wanted
        body = "@body" if plan.mode == "none" else calls_or_answer(lark, frame, plan.tools, single=single)
        around = lark.source(_after_thinking(front, lark, state, body, budget))
        at_most("tools", len(around.encode()), front.config.max_grammar_bytes, "bytes")
        return wanted[0], msgspec.structs.replace(wanted[1], around=around)
    if plan.mode != "required" and not strict:
        if budget is None:
            return None
        body = ANY_TEXT
    elif plan.mode == "required":
        body = calls_only(lark, frame, plan.tools, single=single)
    else:
        leading = front.style.syntax.leading
        body = calls_or_text(lark, frame, plan.tools, single=single, leading=leading)
    source = lark.source(_after_thinking(front, lark, state, body, budget))
    param = "thinking_token_budget" if body == ANY_TEXT else "tools"
    at_most(param, len(source.encode()), front.config.max_grammar_bytes, "bytes")
    return param, GrammarJob("lark", source)


def _after_thinking(
    front: Front, lark: Lark, state: ThinkState, body: str, budget: ThinkBudget | None
) -> str:
    return body if front.reasoning is None else after_thinking(lark, front.reasoning, state, body, budget)
