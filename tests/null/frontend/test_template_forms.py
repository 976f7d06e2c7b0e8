"""The form in which a template takes content, the template for tools, and messages that a template loses."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.template_messages import lost_message
from tests.support.asgi import TOKENIZER, ask
from tests.support.fake_engine import FakeEngine
from tests.support.scripted import ask_app, scripted

NOON = datetime(2026, 11, 28, 12)

LOOP = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
SELECT = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p.text }}{% endfor %}{% endfor %}"
)
FIRST = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "parts"), [(LOOP, True), (SELECT, True), (FIRST, True), (EITHER, False), (STRING, False)]
)
@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
def test_a_template_gets_the_form_that_it_shows(source: str, parts: bool, content: Any) -> None:
    template = ChatTemplate(source)
    assert template.takes_parts is parts
    app = create_app(scripted("x"), TOKENIZER, template, HttpConfig())
    shown = ask_app(app, "/apply_template", {"messages": [{"role": "user", "content": content}]})
    assert shown.json() == {"prompt": "[user]hello"}
    body = {"messages": [{"role": "user", "content": content}], "chat_template": source}
    own = ask(FakeEngine(), "/apply_template", body, request_chat_template=True)
    assert own.json() == {"prompt": "[user]hello"}


def test_a_last_message_in_parts_is_gone_on_with() -> None:
    messages = [{"role": "assistant", "content": "Well"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert ChatTemplate(LOOP + "</s>").render(messages, now=NOON, **options) == "[assistant]Well"


def test_the_template_for_tools() -> None:
    template = ChatTemplate("plain:{{ messages[-1].content }}", tool_source="tools:{{ tools | length }} hi")
    assert template.render([{"role": "user", "content": "hi"}], now=NOON) == "plain:hi"
    assert template.render([{"role": "user", "content": "hi"}], tools=[{}, {}], now=NOON) == "tools:2 hi"


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "messages[0]"),
        ("{{ messages[0].content }}", "messages[1]"),
        ("{% for m in messages %}{{ m.text }}{% endfor %}", "messages[0]"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error(source: str, param: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    app = create_app(scripted("x"), TOKENIZER, ChatTemplate(source), HttpConfig())
    response = ask_app(app, "/v1/chat/completions", {"messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("content", "text"),
    [('say "hi"\n', '"say \\"hi\\"\\n"'), ("  trimmed ", "trimmed"), ("…!", ""), ("", ""), ("a b", "[b]")],
)
def test_a_text_that_is_trimmed_or_quoted_is_not_lost(content: str, text: str) -> None:
    assert lost_message([{"role": "user", "content": content}], text) is None
