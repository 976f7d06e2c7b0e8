"""How much a model is asked to think, as far as its chat template can be told, and thoughts in transit."""

from __future__ import annotations

import base64
import binascii
from typing import Protocol

from pegainfer.contract.request import INT32_MAX
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.fields import count
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.render import BUDGETS, TemplateValue
from pegainfer.frontend.tools.enforce import ThinkBudget

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Variables by which templates are told whether to think: Qwen's and GLM's name, DeepSeek's and Kimi's.
_SWITCHES = ("enable_thinking", "thinking")
_LEVEL = "reasoning_effort"  # where a template knows levels
# Marks thoughts that this server wrote, for clients which only keep what they cannot read. It is no secret.
_ENCODED = "pegainfer1:"


def encoded_thoughts(text: str) -> str:
    """Thoughts in the form in which a client sends them back."""
    return _ENCODED + base64.b64encode(text.encode()).decode()


def decoded_thoughts(text: str) -> str | None:
    """What `encoded_thoughts` was given; None for what it did not write."""
    if not text.startswith(_ENCODED):
        return None
    try:
        return base64.b64decode(text[len(_ENCODED) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


class Thinks(Protocol):
    """The fields that decide how a model thinks."""

    @property
    def chat_template_kwargs(self) -> dict[str, TemplateValue] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def enable_thinking(self) -> bool | None: ...
    @property
    def thinking_token_budget(self) -> int | None: ...
    @property
    def thinking_budget(self) -> int | None: ...


def thinking_variables(front: Front, r: Thinks) -> dict[str, TemplateValue]:
    """What the template gets for the fields that decide how a model thinks. Raises ApiError (400).

    On a model that does not think, none of them can change the answer.
    """
    found = effort_variables(front, r.reasoning_effort)
    if r.enable_thinking is None or (front.reasoning is None and not knows_levels(front)):
        return found
    switched = thinking_switch(front, on=r.enable_thinking)
    if not switched and not r.enable_thinking:
        if not knows_levels(front):
            raise bad_value("enable_thinking", "true: this model always thinks", "false")
        switched = {_LEVEL: "none"}
    for name, value in switched.items():
        if found.get(name, value) != value:
            raise bad_value("enable_thinking", f"what reasoning_effort {r.reasoning_effort!r} means", value)
    return {**found, **switched}


def budget_of(front: Front, r: Thinks, max_tokens: int | None) -> ThinkBudget | None:
    """The bound on the tokens of the thoughts; None where there is none. Raises ApiError (400).

    vLLM's and Qwen's names are taken, as fields and among the template's variables; -1 means no bound.

    Args:
        max_tokens: of the answer. A bound that is no lower asks for nothing.
    """
    given = {name: getattr(r, name) for name in BUDGETS}
    for name in BUDGETS:
        given[f"chat_template_kwargs.{name}"] = (r.chat_template_kwargs or {}).get(name)
    found: int | None = None
    for name, value in given.items():
        if value is None or value == -1:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad_value(name, "a number of tokens", repr(value))
        count(name, value, 0, 0, INT32_MAX)
        if found not in (None, value):
            raise bad_value(name, f"the other budget's {found}", value)
        found = value
    most = min(front.engine.info.max_model_len, INT32_MAX if max_tokens is None else max_tokens)
    if found is None or front.reasoning is None or found >= most:
        return None
    tokens = think_tokens(front)
    if tokens is None:
        expected = f"a model whose {front.reasoning.start} and {front.reasoning.end} are tokens"
        raise bad_value(BUDGETS[0], expected, "another", code="unsupported")
    return ThinkBudget(found, *tokens)


def think_tokens(front: Front) -> tuple[int, int] | None:
    """The ids of the tokens around the thoughts; None where the markers are no tokens."""
    if front.reasoning is None:
        return None
    start, end = (front.tokenizer.token_id(text) for text in (front.reasoning.start, front.reasoning.end))
    return None if start is None or end is None else (start, end)


def effort_variables(
    front: Front, effort: str | None, param: str = "reasoning_effort"
) -> dict[str, TemplateValue]:
    """What the template gets for a reasoning effort. Raises ApiError (400) for what the model cannot do.

    Where the template knows no levels, all but 'none' mean that the model thinks. On a model that does not
    think, no effort can change the answer.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise bad_value(param, "one of " + ", ".join(EFFORTS), repr(effort[:40]))
    if knows_levels(front):
        return {_LEVEL: effort}
    thinks = effort != "none"
    switched = thinking_switch(front, on=thinks)
    if not switched and not thinks and front.reasoning is not None:
        raise bad_value(param, "a model that can answer without thinking", repr(effort))
    return switched


def knows_levels(front: Front) -> bool:
    """Whether the template tells the model how much to think."""
    return front.template is not None and _LEVEL in front.template.variables


def thinking_switch(front: Front, *, on: bool) -> dict[str, TemplateValue]:
    """The template's variable that turns thinking on or off; empty where there is none."""
    if front.template is None or front.reasoning is None:
        return {}
    return next(({name: on} for name in _SWITCHES if name in front.template.variables), {})
