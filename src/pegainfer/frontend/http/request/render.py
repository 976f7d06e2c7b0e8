"""A chat's messages to its prompt: in this process where that is quick, else in one that can be killed."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.messages import Message, to_template, with_text_arguments
from pegainfer.frontend.http.request.neutral import asks_for_nothing
from pegainfer.frontend.template_messages import cut_at_mark, lost_message, with_parts
from pegainfer.frontend.tools.prompt import knows_tools, plain_messages
from pegainfer.frontend.worker import TemplateJob

TemplateValue = bool | int | float | str | None
# Bounds on the thoughts by vLLM's name and by Qwen's. As variables they are the server's affair, unless the
# template looks them up.
BUDGETS = ("thinking_token_budget", "thinking_budget")
# The model's own template is trusted with so much of a request: it takes a few milliseconds, and its loops
# watch the clock. More goes to a worker process, whose round trip costs about a millisecond.
INLINE_BYTES = 256 << 10


class Rendered(Protocol):
    """The fields that decide a prompt's text."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, TemplateValue] | None: ...
    @property
    def chat_template(self) -> str | None: ...


async def rendered(
    front: Front,
    r: Rendered,
    size: int,
    tools: Sequence[dict[str, Any]] = (),
    extra: Mapping[str, TemplateValue] = MappingProxyType({}),
    *,
    checked: bool = True,
) -> str:
    """The prompt's text. Raises ApiError or RequestError for messages that cannot be rendered.

    Args:
        size: of the request, in bytes.
        tools: in OpenAI's form.
        extra: the template's variables that other fields of the request stand for.
        checked: a message that the template leaves out is an error; else the text is shown as it is.
    """
    source = r.chat_template
    if source is not None and not front.config.request_chat_template:
        raise bad_value("chat_template", "none: this server runs without --request-chat-template", "one")
    variables, cut = await front.text_work(size, lambda: _variables(front, r, tools, extra), "template")
    now = datetime.datetime.now()
    try:
        text = await _run(front, variables, now, size, source)
    except RequestError:
        if not any("tool_calls" in m for m in variables["messages"]):
            raise
        # Templates differ in whether a call's arguments are an object or text.
        as_text = {**variables, "messages": with_text_arguments(variables["messages"])}
        text = await _run(front, as_text, now, size, source)
    if not cut and source is not None and lost_message(variables["messages"], text) is not None:
        # A template of the request's own may show a message only where its content is a list of parts.
        as_parts = {**variables, "messages": with_parts(variables["messages"])}
        text = await _run(front, as_parts, now, size, source)
    if cut:
        return cut_at_mark(text)
    if checked:
        _check_shown(variables["messages"], text)
    return text


def _check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises ApiError (400) where the template leaves a message out, which the model would not know of."""
    lost = lost_message(messages, text)
    if lost is not None:
        got = f"one that leaves out this message of role {messages[lost]['role']}"
        raise bad_value(f"messages[{lost}]", "a chat template that shows it", got)


async def _run(
    front: Front, variables: dict[str, Any], now: datetime.datetime, size: int, source: str | None
) -> str:
    """`source`: a template of the request's own, which is trusted with nothing."""
    template = front.template
    assert template is not None
    if size <= INLINE_BYTES and source is None:
        return await front.text_work(size, lambda: template.render_variables(variables, now), "template")
    job = front.workers.run(
        TemplateJob(variables, now, source), front.config.template_seconds, "the chat template"
    )
    return await front.timed("template", job)


def _not_the_templates(name: str, value: TemplateValue) -> bool:
    """Of a variable that the template does not look up: whether it may be left out."""
    return name in BUDGETS or asks_for_nothing("", value)


def _variables(
    front: Front, r: Rendered, tools: Sequence[dict[str, Any]], extra: Mapping[str, TemplateValue]
) -> tuple[dict[str, Any], bool]:
    """What the template gets, and whether its text is cut at the end of the last message."""
    if front.template is None:
        raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
    messages = to_template(r.messages or [])
    allowed = front.config.chat_template_kwargs
    # A variable that the template does not look up asks for nothing where its value is empty.
    variables: dict[str, Any] = {
        name: value
        for name, value in (r.chat_template_kwargs or {}).items()
        if name in allowed or name in front.template.variables or not _not_the_templates(name, value)
    }
    for name in variables:
        if name not in allowed and name not in BUDGETS:
            known = ", ".join(allowed) or "none"
            raise bad_value("chat_template_kwargs", f"names that are allowed ({known})", repr(name))
        if extra.get(name, variables[name]) != variables[name]:
            raise bad_value(f"chat_template_kwargs.{name}", "what the request's other fields mean", "another")
    variables.update(extra)
    going_on = bool(r.continue_final_message)
    # Going on with a message and opening a new one exclude each other: only what is said counts.
    opening = not going_on if r.add_generation_prompt is None else r.add_generation_prompt
    if going_on and messages[-1]["role"] != "assistant":
        raise bad_value("continue_final_message", "an assistant message at the end", messages[-1]["role"])
    shown: Sequence[Any] = messages
    if front.style.name == "hermes" and not knows_tools(r.chat_template or front.template.all_source):
        shown, tools = plain_messages(messages, tools), ()
    prepared = front.template.prepare(
        shown,
        add_generation_prompt=opening,
        continue_final_message=going_on,
        tools=list(tools) or None,
        variables=variables,
    )
    return prepared, going_on
