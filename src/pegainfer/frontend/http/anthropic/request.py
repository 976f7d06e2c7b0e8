"""A request in Anthropic's shape, and the chat that it stands for."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.contract.request import INT32_MAX
from pegainfer.frontend.http.anthropic.content import (
    CacheControl,
    SystemBlock,
    Turn,
    chat_drafts,
    prefilled,
    system_text,
)
from pegainfer.frontend.http.errors import field_names
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.conversation import ChatRequest
from pegainfer.frontend.http.request.fields import SHARED, CommonFields, count, token_limit
from pegainfer.frontend.http.request.formats import JsonSchemaFormat, ResponseFormat
from pegainfer.frontend.http.request.limits import bad_value, unsupported
from pegainfer.frontend.http.request.neutral import Harmless, asks_for_nothing, refuse_unserved
from pegainfer.frontend.http.request.render import TemplateValue
from pegainfer.frontend.http.request.thinking import EFFORTS, knows_levels, think_tokens, thinking_switch
from pegainfer.frontend.http.request.tools import FunctionParam, NamedFunction, NamedTool, ToolParam
from pegainfer.frontend.http.request.turns import Draft, systems_as_users
from pegainfer.frontend.json_object import JsonObject

MIN_BUDGET = 1024  # tokens, Anthropic's own bound
THINKING = ("enabled", "disabled", "adaptive")

# What the chat's checks call a field → what it is called here.
NAMES = field_names(
    {
        r"^tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"^tools\[(\d+)\]\.function": r"tools[\1]",
        r"^tool_choice\.function": "tool_choice",
        r"^stop\b(?!_)": "stop_sequences",
        r"^response_format\.json_schema\.schema": "output_config.format.schema",
        r"^response_format": "output_config.format",
        r"^reasoning_effort": "output_config.effort",
        r"^thinking_token_budget\b": "thinking.budget_tokens",
        r"^user\b": "metadata.user_id",
    }
)


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    input_schema: JsonObject | None = None
    type: str | None = None  # absent or custom: a tool of the client
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # a wish for small deltas, which all calls have
    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


class AnthropicChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str  # auto, any, tool, none
    name: str | None = None  # of `tool`
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    schema: JsonObject


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(CommonFields, kw_only=True):
    """What decides the prompt, beside fields that do not."""

    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    speed: Harmless = None
    user_profile_id: Harmless = None
    workspace_id: Harmless = None
    # Known of Anthropic's API and not served, see GenerateFields.
    mcp_servers: Any = None
    context_management: Any = None
    thread: Any = None


CountRequest = msgspec.defstruct(
    "CountRequest",
    [
        (f.name, f.type) if f.required else (f.name, f.type, f.default)
        for f in msgspec.structs.fields(PromptFields)
        if f.name == "model" or f.name not in SHARED
    ],
    kw_only=True,
    forbid_unknown_fields=True,
    module=__name__,
    namespace={"__doc__": "What count_tokens takes: nothing is drawn there."},
)


class MessagesRequest(PromptFields, kw_only=True):
    max_tokens: int | None = None  # absent: up to the context's end
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


def to_chat(front: Front, r: PromptFields) -> ChatRequest:
    """The chat that a request stands for. Raises ApiError (400) that speaks of the request's own fields."""
    refuse_unserved(r)
    drafts = chat_drafts(r.messages)
    system = system_text(r.system)
    if system:
        drafts.insert(0, Draft("system", [system]))
    if not front.late_systems:
        drafts = systems_as_users(drafts)
    chat = ChatRequest(
        messages=[draft.message() for draft in drafts],
        continue_final_message=prefilled(r.messages) or None,
        chat_template_kwargs=_template_variables(front, r),
        tools=None if r.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(r.tools)],
        **{name: getattr(r, name) for name in SHARED},
    )
    if r.tool_choice is not None:
        _choose(chat, r.tool_choice)
    if r.output_config is not None:
        chat.reasoning_effort = _effort(front, r.output_config.effort)
        if r.output_config.format is not None:
            chat.response_format = _format(r.output_config.format)
    if isinstance(r, MessagesRequest):
        r.max_tokens = token_limit("max_tokens", r.max_tokens)
        _check_budget(r)
        if r.thinking is not None and think_tokens(front) is not None:  # clients cannot do without a budget
            chat.thinking_token_budget = r.thinking.budget_tokens
        chat.max_tokens, chat.stop = r.max_tokens, r.stop_sequences
        if r.metadata is not None and r.metadata.user_id is not None:
            chat.user = r.metadata.user_id
    return chat


def _tool(tool: AnthropicTool, where: str) -> ToolParam:
    if tool.type not in (None, "custom"):
        got = f"{tool.type!r}: tools that run on the server are not offered"
        raise bad_value(f"{where}.type", "custom", got, code="unsupported")
    for name in ("allowed_callers", "defer_loading", "input_examples"):
        if not asks_for_nothing(name, getattr(tool, name)):
            raise unsupported(f"{where}.{name}")
    if tool.input_schema is None:
        raise bad_value(f"{where}.input_schema", "a JSON schema", "none")
    function = FunctionParam(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return ToolParam(type="function", function=function)


def _choose(chat: ChatRequest, choice: AnthropicChoice) -> None:
    """Sets the chat's tool_choice and parallel_tool_calls."""
    named = choice.type == "tool"
    if named is (choice.name is None):
        raise bad_value("tool_choice.name", "a name beside type tool, and only there", repr(choice.name))
    match choice.type:
        case "tool":
            chat.tool_choice = NamedTool(function=NamedFunction(name=choice.name or ""))
        case "any":
            chat.tool_choice = "required"
        case "auto" | "none":
            chat.tool_choice = choice.type
        case _:
            raise bad_value("tool_choice.type", "auto, any, tool or none", repr(choice.type[:40]))
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _format(wanted: OutputFormat) -> ResponseFormat:
    if wanted.type != "json_schema":
        raise bad_value("output_config.format.type", "json_schema", repr(wanted.type[:40]))
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(name="output", schema=wanted.schema)
    )


def _effort(front: Front, effort: str | None) -> str | None:
    """None where the model knows no levels: no level turns thinking on, so that none changes the answer."""
    return None if effort in EFFORTS and not knows_levels(front) else effort


def _template_variables(front: Front, r: PromptFields) -> dict[str, TemplateValue] | None:
    """The template's variables, with the one that `thinking` stands for."""
    given = r.chat_template_kwargs
    if r.thinking is None:
        return {**thinking_switch(front, on=False), **(given or {})}
    if r.thinking.type not in THINKING:
        raise bad_value("thinking.type", "one of " + ", ".join(THINKING), repr(r.thinking.type[:40]))
    on = r.thinking.type != "disabled"
    switch = thinking_switch(front, on=on)
    if not switch and not on and front.reasoning is not None:
        raise bad_value("thinking.type", "enabled or adaptive: this model always thinks", "'disabled'")
    return {**switch, **(given or {})}


def _check_budget(r: MessagesRequest) -> None:
    thinking = r.thinking
    if thinking is None:
        return
    if thinking.display not in (None, "summarized", "omitted"):
        raise bad_value("thinking.display", "summarized or omitted", repr(thinking.display[:40]))
    budget = thinking.budget_tokens
    if (thinking.type == "enabled") is (budget is None):
        got = "none" if budget is None else budget
        raise bad_value("thinking.budget_tokens", "a number beside type enabled, and only there", got)
    if budget is not None:
        count("thinking.budget_tokens", budget, 0, MIN_BUDGET, INT32_MAX)
        if r.max_tokens is not None and budget >= r.max_tokens:
            raise bad_value("thinking.budget_tokens", f"< max_tokens = {r.max_tokens}", budget)
