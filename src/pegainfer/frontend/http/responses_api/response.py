"""The response object: what a request was answered with, and under which settings."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.responses_api.items import JsonObject
from pegainfer.frontend.http.responses_api.request import ReasoningConfig, ResponsesRequest


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """Mutable: it is kept up to date while it is generated."""

    id: str
    object: str = "response"
    created_at: int  # seconds of the wall clock
    completed_at: int | None = None
    status: str = "in_progress"  # completed, incomplete, failed, cancelled
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[JsonObject]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: JsonObject
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: JsonObject
    tool_choice: Any
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


def begun(front: Front, r: ResponsesRequest, id: str) -> Response:
    """The response to a checked request, before anything of it is generated."""
    defaults = front.chat_defaults
    reasoning = r.reasoning or ReasoningConfig()
    wanted = None if r.text is None else r.text.format
    return Response(
        id=id,
        created_at=int(time.time()),
        background=bool(r.background),
        instructions=r.instructions,
        max_output_tokens=r.max_output_tokens,
        metadata=r.metadata or {},
        model=front.names[0],
        output=[],
        parallel_tool_calls=r.parallel_tool_calls is not False,
        previous_response_id=r.previous_response_id,
        prompt_cache_key=r.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
        safety_identifier=r.safety_identifier,
        store=r.store is not False,
        temperature=defaults.temperature if r.temperature is None else r.temperature,
        text={"format": {"type": "text"} if wanted is None else _given(wanted), "verbosity": "medium"},
        tool_choice="auto" if r.tool_choice is None else _given(r.tool_choice),
        tools=[_given(tool) for tool in r.tools or ()],
        top_logprobs=r.top_logprobs or 0,
        top_p=defaults.top_p if r.top_p is None else r.top_p,
        truncation=r.truncation or "disabled",
        user=r.user,
    )


def _given(value: Any) -> Any:
    """As JSON's own types, without the fields that were not given."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {name: v for name, v in msgspec.to_builtins(value).items() if v is not None}
