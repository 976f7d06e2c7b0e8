"""What a system says in the middle of a conversation, on templates that show it there and on others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.anthropic.content import chat_drafts
from pegainfer.frontend.http.anthropic.request import MessagesRequest
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.turns import Draft, systems_as_users
from tests.support.asgi import TOKENIZER
from tests.support.scripted import ask_app, prompt_of, scripted

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
SHOWS = {"qwen3": True, "llama3": True, "qwen3_5_think": False, "gemma": False, "mistral_v3_tekken": False}
TURNS = [
    {"role": "user", "content": "first"},
    {"role": "system", "content": "listen"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "answer"},
    {"role": "system", "content": "again"},
    {"role": "user", "content": "third"},
]


@pytest.mark.parametrize("name", SHOWS)
@pytest.mark.parametrize(("path", "field"), [("/v1/messages", "messages"), ("/v1/responses", "input")])
def test_every_template_shows_it(name: str, path: str, field: str) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    engine = scripted("x")
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    app = create_app(engine, TOKENIZER, template, HttpConfig())
    assert app.front.late_systems is SHOWS[name]
    answer = ask_app(app, path, {field: TURNS})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(engine)
    places = [prompt.index(word) for word in ("first", "listen", "second", "answer", "again", "third")]
    assert places == sorted(places)


def test_it_becomes_a_part_of_the_users_turn() -> None:
    drafts = [Draft("system", ["s"]), *(Draft(t["role"], [t["content"]]) for t in TURNS)]
    messages = [draft.message() for draft in systems_as_users(drafts)]
    assert [(m.role, m.content) for m in messages] == [
        ("system", "s"),
        ("user", "first\nlisten\nsecond"),
        ("assistant", "answer"),
        ("user", "again\nthird"),
    ]


def test_a_turn_of_very_many_pieces_takes_no_longer_than_its_length() -> None:
    """Copying what was joined so far for each piece would take 100 GB through memory here, and minutes."""
    piece = {"type": "text", "text": "x" * 20}
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": [piece] * 100_000},
        {"role": "assistant", "content": [piece, called] * 50_000},
    ]
    request = msgspec.convert({"messages": turns}, MessagesRequest)
    user, assistant = (draft.message() for draft in chat_drafts(request.messages))
    assert isinstance(user.content, str) and len(user.content) == 21 * 100_000 - 1
    assert len(assistant.tool_calls or ()) == 50_000
