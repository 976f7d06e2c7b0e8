"""Scripted answers of a model that thinks and calls tools, over the fake engine."""

from __future__ import annotations

from typing import Any

import httpx

from pegainfer.contract.handle import EngineInfo
from pegainfer.contract.request import unpack_tokens
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TOKENIZER, client, run
from tests.support.fake_engine import INFO, FakeEngine

EOS = 257
LONG = EngineInfo(**{**{f: getattr(INFO, f) for f in INFO.__struct_fields__}, "max_model_len": 8192})
# Shows all that a message may hold, a line each.
TEMPLATE = (
    "{% set line = '\\n' %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}|thought:{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}|call:{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}|of:{{ m.tool_call_id }}{% endif %}"
    "{% if not loop.last or add_generation_prompt %}{{ line }}{% endif %}{% endfor %}"
    "{% for t in tools or [] %}tool:{{ t.function.name }}{{ line }}{% endfor %}"
    "{# <tool_call> #}"
)
THINKS = "{% if add_generation_prompt %}<think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"


def scripted(text: str, **more: Any) -> FakeEngine:
    """Says the text, then ends."""
    return FakeEngine(lambda request, index: [*text.encode(), EOS], info=LONG, **more)


def app_of(engine: FakeEngine, *, thinks: bool = False, **config: Any) -> App:
    template = ChatTemplate(TEMPLATE + (THINKS if thinks else ""), {})
    return create_app(engine, TOKENIZER, template, HttpConfig(**config))


def ask_app(
    app: App, path: str, body: Any = None, *, method: str | None = None, **headers: str
) -> httpx.Response:
    """One request; a POST where there is a body."""
    got: list[httpx.Response] = []

    async def main() -> None:
        async with client(app, **headers) as http:
            if body is None:
                got.append(await http.request(method or "GET", path))
            else:
                got.append(await http.request(method or "POST", path, json=body))

    run(main)
    return got[0]


def prompt_of(engine: FakeEngine) -> str:
    """What the model read last."""
    return TOKENIZER.decode(unpack_tokens(engine.requests[-1].prompt), skip_special_tokens=False)
