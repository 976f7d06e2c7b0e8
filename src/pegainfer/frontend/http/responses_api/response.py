"""The response object: what a request was answered with, and under which settings."""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.frontend.json_object import JsonObject


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
