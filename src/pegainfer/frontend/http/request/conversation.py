"""From a checked chat to a generation: the way that chat, responses and messages share.

ChatRequest ──► rendered by the template ──► grammar of tools or format ──► tokenised ──► Generation
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.frontend.http.answer.generation import Generation, Prompt
from pegainfer.frontend.http.answer.reply import ReplySyntax
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.fields import GenerateFields
from pegainfer.frontend.http.request.grammars import output_grammar
from pegainfer.frontend.http.request.jobs import Common, build_prompt, common, prompt_ids, sampling
from pegainfer.frontend.http.request.messages import Message
from pegainfer.frontend.http.request.options import AnswerOptions
from pegainfer.frontend.http.request.render import TemplateValue, rendered
from pegainfer.frontend.http.request.thinking import budget_of, thinking_variables
from pegainfer.frontend.http.request.tools import NamedTool, ToolParam, ToolPlan, output_job, tool_plan
from pegainfer.frontend.reasoning.think import ThinkState


class ChatRequest(GenerateFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None
    chat_template: str | None = None  # in place of the model's, where the server allows it
    tools: list[ToolParam] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None  # as among chat_template_kwargs
    thinking_token_budget: int | None = None  # tokens that the model may think; -1: any number
    thinking_budget: int | None = None  # the same, as Qwen's API calls it
    safety_identifier: str | None = None  # as `user`
    prompt_cache_key: str | None = None  # a hint; prefixes are shared with and without it
    # Not served, see GenerateFields.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    echo: Any = None
    include_reasoning: Any = None
    separate_reasoning: Any = None


class Conversation(msgspec.Struct, frozen=True):
    """A chat ready to be answered."""

    generation: Generation
    syntax: ReplySyntax  # how its answer is taken apart


async def prepare(
    front: Front, request: ChatRequest, options: AnswerOptions, size: int, arrival: float
) -> Conversation:
    """Renders, checks and tokenises. Raises ApiError, RequestError, QueueFullError.

    Args:
        size: of the request, in bytes.
        arrival: CLOCK_MONOTONIC seconds.
    """
    shared = common(request, front, arrival)
    plan = tool_plan(request)
    text = await prompt_text(front, request, plan, size)
    syntax = _reply_syntax(front, plan, text)
    schemas = [tool.function.parameters for tool in request.tools or ()]
    budget = budget_of(front, request, options.max_tokens)
    job = output_job(front, request, plan, syntax.state, budget)
    shared = msgspec.structs.replace(
        shared,
        grammar=None if job is None else await output_grammar(front, *job, schemas),
        shown_ids=front.marker_ids(tools=bool(plan.tools)),
    )
    prompt = await front.text_work(len(text), lambda: _prompt(front, request, shared, options, text))
    return Conversation(front.generation(shared.id, [prompt], arrival), syntax)


async def prompt_text(front: Front, request: ChatRequest, plan: ToolPlan, size: int) -> str:
    """What the model reads. Raises ApiError, RequestError."""
    variables = thinking_variables(front, request)
    return await rendered(front, request, size, plan.shown, variables)


def _reply_syntax(front: Front, plan: ToolPlan, prompt: str) -> ReplySyntax:
    """How an answer to this prompt is taken apart."""
    reasoning = front.reasoning
    state = ThinkState.CLOSED if reasoning is None else reasoning.state_after(prompt)
    return ReplySyntax(
        style=front.style, tools=plan.tools, single=plan.single, reasoning=reasoning, state=state
    )


def _prompt(front: Front, r: ChatRequest, shared: Common, options: AnswerOptions, text: str) -> Prompt:
    params = sampling(front, r, options, front.chat_defaults)
    # The template has written BOS itself.
    ids = prompt_ids(text, r, front, "messages", special=bool(r.add_special_tokens))
    return build_prompt(front, r, shared, params, ids)
