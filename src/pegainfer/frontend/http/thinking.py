"""How much a model is asked to think, as far as its chat template can be told, and thoughts in transit."""

from __future__ import annotations

import base64
import binascii

from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.limits import bad_value
from pegainfer.frontend.http.render import TemplateValue

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
