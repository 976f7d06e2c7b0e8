"""The response to a request of which nothing is generated yet: its settings, those left out filled in."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.responses_api.request import ReasoningConfig, ResponsesRequest
from pegainfer.frontend.http.responses_api.response import Response


def begun(front: Front, r: ResponsesRequest, id: str, adapter: str | None = None) -> Response:
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
        model=front.answered_name(adapter),
        output=[],
        parallel_tool_calls=r.parallel_tool_calls is not False,
        previous_response_id=r.previous_response_id,
        prompt_cache_key=r.prompt_cache_key,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
        safety_identifier=r.safety_identifier,
        store=r.store is not False,
        temperature=defaults.temperature if r.temperature is None else r.temperature,
        text={
            "format": {"type": "text"} if wanted is None else _given(wanted),
            "verbosity": (None if r.text is None else r.text.verbosity) or "medium",
        },
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
