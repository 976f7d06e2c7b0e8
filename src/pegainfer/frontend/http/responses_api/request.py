"""A request of the responses API, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pegainfer.frontend.http.errors import field_names
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.conversation import ChatRequest
from pegainfer.frontend.http.request.fields import SHARED, CommonFields, count, token_limit
from pegainfer.frontend.http.request.formats import JsonSchemaFormat, ResponseFormat
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.http.request.neutral import Harmless, refuse_unserved
from pegainfer.frontend.http.request.options import AnswerOptions, most_logprobs
from pegainfer.frontend.http.request.render import TemplateValue
from pegainfer.frontend.http.request.turns import systems_as_users
from pegainfer.frontend.http.responses_api.items import chat_drafts
from pegainfer.frontend.http.responses_api.tools import (
    ResponsesChoice,
    ResponsesTool,
    chat_choice,
    chat_tools,
)
from pegainfer.frontend.json_object import JsonObject

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDES = (
    LOGPROBS,
    ENCRYPTED,
    # Parts of items that are never made here.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
MAX_METADATA = 16
_OF_PATHS = "/?#%"
MAX_METADATA_CHARS = (64, 512)  # of a key, of a value

# What the chat's checks call a field → what it is called here.
NAMES = field_names(
    {
        r"^tools\[(\d+)\]\.function": r"tools[\1]",
        r"^tool_choice\.function": "tool_choice",
        r"^max_tokens\b": "max_output_tokens",
        r"^messages": "input",
        r"^response_format\.json_schema": "text.format",
        r"^response_format": "text.format",
        r"^reasoning_effort": "reasoning.effort",
    }
)


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Harmless = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: Any = None
    context: Any = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(CommonFields, kw_only=True):
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None  # absent: up to the context's end
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None  # absent: true
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None  # Codex's; written to the debug log
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    # As of a chat.
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    max_tool_calls: Harmless = None  # of tools that run on the server, of which there are none
    # Known of OpenAI's API and not served, see GenerateFields.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    @property
    def includes(self) -> frozenset[str]:
        return frozenset(self.include or ())


def check(front: Front, r: ResponsesRequest) -> None:
    """Fields that are not the chat's affair. Raises ApiError (400)."""
    refuse_unserved(r)
    r.max_output_tokens = token_limit("max_output_tokens", r.max_output_tokens)
    if r.request_id is not None and set(r.request_id) & set(_OF_PATHS):
        raise bad_value(
            "request_id", f"none of {_OF_PATHS}: it becomes part of a path", repr(r.request_id[:80])
        )
    for name in r.include or ():
        if name not in INCLUDES:
            raise bad_value("include", "any of " + ", ".join(INCLUDES), repr(name[:60]))
    if r.top_logprobs is not None:
        count("top_logprobs", r.top_logprobs, 0, 0, most_logprobs(front))
    if r.metadata is not None:
        at_most("metadata", len(r.metadata), MAX_METADATA, "entries")
        for key, value in r.metadata.items():
            at_most("metadata", len(key), MAX_METADATA_CHARS[0], "characters of a key")
            at_most(f"metadata.{key}", len(value), MAX_METADATA_CHARS[1], "characters")
    if r.stream_options is not None and r.stream_options.include_obfuscation:
        raise bad_value("stream_options.include_obfuscation", "false", "true")
    if r.background and (r.stream or r.store is False):
        raise bad_value("background", "neither stream: true nor store: false beside it", "true")
    if r.reasoning is not None:
        refuse_unserved(r.reasoning, "reasoning.")
        if r.reasoning.summary not in (None, "auto"):
            # 'auto' is the best summary there is; there is none, the thoughts themselves are shown.
            raise bad_value(
                "reasoning.summary", "auto: thoughts are not summarised", repr(r.reasoning.summary)
            )


def options(front: Front, r: ResponsesRequest) -> AnswerOptions:
    """Raises ApiError (400)."""
    logprobs = None
    if r.top_logprobs or LOGPROBS in r.includes:
        if r.tools or front.reasoning is not None:
            name = "include" if LOGPROBS in r.includes else "top_logprobs"
            raise bad_value(
                name, "no tools, and a model that does not think: text alone has logprobs", "both"
            )
        logprobs = r.top_logprobs or 0
    return AnswerOptions(max_tokens=r.max_output_tokens, logprobs=logprobs)


def to_chat(front: Front, r: ResponsesRequest, items: Sequence[JsonObject]) -> ChatRequest:
    """The chat that a request stands for. Raises ApiError (400) that speaks of the request's own fields.

    Args:
        items: normalised; those of the previous response and the request's own.
    """
    if not items:
        raise bad_value("input", "a text or at least one item", "none")
    drafts = chat_drafts(r.instructions, items)
    if not front.late_systems:
        drafts = systems_as_users(drafts)
    chat = ChatRequest(
        messages=[draft.message() for draft in drafts],
        chat_template_kwargs=r.chat_template_kwargs,
        tools=chat_tools(r.tools),
        tool_choice=chat_choice(r.tool_choice),
        parallel_tool_calls=r.parallel_tool_calls,
        max_tokens=r.max_output_tokens,
        safety_identifier=r.safety_identifier,
        prompt_cache_key=r.prompt_cache_key,
        enable_thinking=r.enable_thinking,
        thinking_token_budget=r.thinking_token_budget,
        thinking_budget=r.thinking_budget,
        **{name: getattr(r, name) for name in SHARED},
    )
    if r.text is not None and r.text.format is not None:
        chat.response_format = _format(r.text.format)
    if r.reasoning is not None:
        chat.reasoning_effort = r.reasoning.effort
    return chat


def _format(wanted: TextFormat) -> ResponseFormat:
    schema = None
    if wanted.type == "json_schema":
        if wanted.name is None:
            raise bad_value("text.format.name", "a name", "none")
        schema = JsonSchemaFormat(name=wanted.name, schema=wanted.schema, strict=wanted.strict)
    elif wanted.schema is not None:
        raise bad_value("text.format.schema", "type json_schema beside it", repr(wanted.type[:40]))
    return ResponseFormat(type=wanted.type, json_schema=schema)
