"""How a model is asked to think: reasoning_effort, by what its template knows."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.thinking import decoded_thoughts, encoded_thoughts
from tests.support.asgi import TOKENIZER
from tests.support.scripted import ask_app, prompt_of, scripted

USER = {"role": "user", "content": "hi"}
SWITCHED = "{{ '<think>' if enable_thinking else '<think></think>' }}"
OTHER_NAME = "{{ '<think>' if thinking else '</think>' }}"
ALWAYS = "{{ messages[0].content }}<think>{# </think> #}"
LEVELS = "hi {{ reasoning_effort }}"
NEVER = "{{ messages[0].content }}"


def ask(template: str, path: str = "/v1/chat/completions", **fields: Any) -> tuple[httpx.Response, str]:
    """The answer, and what the model has read."""
    engine = scripted("x")
    app = create_app(engine, TOKENIZER, ChatTemplate(template, {}), HttpConfig())
    response = ask_app(app, path, {"messages": [USER], **fields})
    return response, prompt_of(engine) if engine.requests else ""


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        (SWITCHED, "none", "<think></think>"),
        (SWITCHED, "minimal", "<think>"),
        (SWITCHED, "max", "<think>"),
        (OTHER_NAME, "none", "</think>"),
        (OTHER_NAME, "low", "<think>"),
        (ALWAYS, "high", "hi<think>"),
        (LEVELS, "high", "hi high"),
        (LEVELS, "none", "hi none"),
        (NEVER, "none", "hi"),
        (NEVER, "low", "hi"),
        (NEVER, None, "hi"),
    ],
)
def test_the_template_is_told(template: str, effort: str | None, prompt: str) -> None:
    response, read = ask(template, reasoning_effort=effort)
    assert response.status_code == 200, response.text
    assert read == prompt
    shown, _ = ask(template, "/apply_template", reasoning_effort=effort)
    assert shown.json()["prompt"] == prompt
    counted, _ = ask(template, "/tokenize", reasoning_effort=effort)
    assert counted.json()["count"] == len(prompt)


@pytest.mark.parametrize(
    ("template", "on", "prompt"),
    [
        (SWITCHED, False, "<think></think>"),
        (SWITCHED, True, "<think>"),
        (OTHER_NAME, False, "</think>"),
        (OTHER_NAME, True, "<think>"),
        (ALWAYS, True, "hi<think>"),
        (LEVELS, False, "hi none"),
        (NEVER, False, "hi"),
        (NEVER, True, "hi"),
    ],
)
def test_thinking_is_switched_by_a_field_of_the_request(template: str, on: bool, prompt: str) -> None:
    """As some clients do it; others put it into chat_template_kwargs."""
    response, read = ask(template, enable_thinking=on)
    assert response.status_code == 200, response.text
    assert read == prompt


@pytest.mark.parametrize(("template", "fields"), [(ALWAYS, {}), (SWITCHED, {"reasoning_effort": "low"})])
def test_a_switch_that_cannot_be_obeyed(template: str, fields: dict[str, str]) -> None:
    response, _ = ask(template, enable_thinking=False, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "enable_thinking"


@pytest.mark.parametrize(("template", "effort"), [(ALWAYS, "none"), (SWITCHED, "loud"), (SWITCHED, "")])
def test_what_the_model_cannot_do_is_refused(template: str, effort: str) -> None:
    for path in ("/v1/chat/completions", "/apply_template", "/tokenize"):
        response, _ = ask(template, path, reasoning_effort=effort)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "reasoning_effort"


def test_two_ways_to_say_it_are_one_too_many() -> None:
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    response, _ = ask(SWITCHED, **both)
    assert response.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"


def test_thoughts_in_transit() -> None:
    for text in ("", "so é \n"):
        assert decoded_thoughts(encoded_thoughts(text)) == text
    for other in ("", "gAAAAA", "pegainfer1:?", "pegainfer1:/w=="):
        assert decoded_thoughts(other) is None
