"""The routes themselves."""

from __future__ import annotations

import time

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.flow import send_body, send_stream
from pegainfer.frontend.http.answer.responses import send_json
from pegainfer.frontend.http.anthropic.answer import MessageAnswer
from pegainfer.frontend.http.anthropic.request import (
    NAMES,
    CountRequest,
    MessagesRequest,
    PromptFields,
    to_chat,
)
from pegainfer.frontend.http.errors import renaming
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import header, read_request
from pegainfer.frontend.http.request.conversation import prepare, prompt_text
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.options import AnswerOptions
from pegainfer.frontend.http.request.tools import tool_plan

VERSIONS = (b"2023-06-01", b"2026-10-21")  # the second one only takes away


class TokenCount(msgspec.Struct):
    input_tokens: int


async def messages(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/messages. Raises what the checks and `send_body` raise."""
    arrival = time.monotonic()
    _check_version(scope)
    request, size = await read_request(scope, receive, MessagesRequest, front.config)
    front.check_model(request.model)
    with renaming(NAMES):
        chat = await front.text_work(size, lambda: to_chat(front, request))
        options = AnswerOptions(max_tokens=request.max_tokens)
        ready = await prepare(front, chat, options, size, arrival)
    generation = ready.generation
    hidden = request.thinking is not None and request.thinking.display == "omitted"
    limit = front.chat_defaults.max_tokens if request.max_tokens is None else request.max_tokens
    answer = MessageAnswer(front, generation, ready.syntax, limit, hide_thoughts=hidden)
    headers = [(b"request-id", generation.id.encode())]
    sender = send_stream if request.stream else send_body
    with renaming(NAMES):
        await sender(front, generation, answer, receive, send, headers)


async def count_tokens(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/messages/count_tokens: the prompt's length as the model would get it."""
    _check_version(scope)
    given, size = await read_request(scope, receive, CountRequest, front.config)
    request = PromptFields(**{name: getattr(given, name) for name in given.__struct_fields__})
    front.check_model(request.model)
    with renaming(NAMES):
        chat = await front.text_work(size, lambda: to_chat(front, request))
        text = await prompt_text(front, chat, tool_plan(chat), size)
        front.check_counted("messages", text)
    # The template has written BOS itself.
    ids = await front.text_work(len(text), lambda: front.tokenizer.encode(text, add_special_tokens=False))
    await send_json(send, TokenCount(len(ids)))


def _check_version(scope: Scope) -> None:
    """Betas are another header, which is not looked at: they bring fields, and these are checked by name."""
    version = header(scope, b"anthropic-version")
    if version is not None and version not in VERSIONS:
        known = " or ".join(v.decode() for v in VERSIONS)
        raise bad_value("anthropic-version", known, repr(version.decode("latin-1")[:40]))
