"""Lists of exactly their limit are served on every route that takes them; one entry more is a 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pegainfer.frontend.grammar.compiler import MAX_CHOICES
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.request.messages import MAX_MESSAGES
from pegainfer.frontend.http.request.tools import MAX_TOOLS
from pegainfer.frontend.http.responses_api.request import MAX_METADATA, MAX_METADATA_CHARS
from tests.support.asgi import ask
from tests.support.fake_engine import INFO, FakeEngine, says

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
CONFIG = HttpConfig()
WIDE = msgspec.structs.replace(INFO, max_model_len=1 << 20)  # so that prompts never end first


def request(path: str) -> dict[str, Any]:
    """The least that each route takes."""
    if path == COMPLETIONS:
        return {"prompt": "a", "max_tokens": 2}
    if path == RESPONSES:
        return {"input": "a", "max_output_tokens": 2}
    if path == EMBEDDINGS:
        return {"input": "a"}
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def stops(count: int) -> list[str]:
    return [f"<{i}>" for i in range(count)]


def turns(count: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": "a"} for i in range(count)]


def functions(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}"}} for i in range(count)]


def flat_functions(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{i}"} for i in range(count)]


def anthropic_tools(count: int) -> list[dict[str, Any]]:
    return [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(count)]


def biases(count: int) -> dict[str, float]:
    """The byte tokenizer has 258 tokens, so the bound is lowered to be met."""
    return {str(i): 1.0 for i in range(count)}


# route, field, what makes a value of so many entries, the most of them
LISTS: list[tuple[str, str, Callable[[int], Any], int]] = [
    *((path, "stop", stops, CONFIG.max_stop_strings) for path in (COMPLETIONS, CHAT)),
    (MESSAGES, "stop_sequences", stops, CONFIG.max_stop_strings),
    *((path, "stop", lambda n: "x" * n, CONFIG.max_stop_bytes) for path in (COMPLETIONS, CHAT)),
    (MESSAGES, "stop_sequences", lambda n: ["x" * n], CONFIG.max_stop_bytes),
    *((path, "stop_token_ids", lambda n: [5] * n, CONFIG.max_logit_bias) for path in (COMPLETIONS, CHAT)),
    *((path, "bad_words", lambda n: ["b"] * n, CONFIG.max_logit_bias) for path in (COMPLETIONS, CHAT)),
    *((path, "n", lambda n: n, CONFIG.max_n) for path in (COMPLETIONS, CHAT)),
    (COMPLETIONS, "prompt", lambda n: ["a"] * n, CONFIG.max_prompts),
    (EMBEDDINGS, "input", lambda n: ["a"] * n, CONFIG.max_prompts),
    (EMBEDDINGS, "input", lambda n: [[97]] * n, CONFIG.max_prompts),
    *((path, "messages", turns, MAX_MESSAGES) for path in (CHAT, MESSAGES)),
    (RESPONSES, "input", turns, MAX_MESSAGES),
    (CHAT, "tools", functions, MAX_TOOLS),
    (RESPONSES, "tools", flat_functions, MAX_TOOLS),
    (MESSAGES, "tools", anthropic_tools, MAX_TOOLS),
    (RESPONSES, "metadata", lambda n: {str(i): "x" for i in range(n)}, MAX_METADATA),
    (RESPONSES, "metadata", lambda n: {"k" * n: "x"}, MAX_METADATA_CHARS[0]),
    (RESPONSES, "metadata", lambda n: {"k": "x" * n}, MAX_METADATA_CHARS[1]),
    *((path, "logprobs", lambda n: n, CONFIG.max_logprobs) for path in (COMPLETIONS,)),
    (RESPONSES, "top_logprobs", lambda n: n, CONFIG.max_logprobs),
]


@pytest.mark.parametrize(
    ("path", "field", "make", "most"), LISTS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_exactly_the_limit(path: str, field: str, make: Callable[[int], Any], most: int) -> None:
    engine = FakeEngine(says("ok"), info=WIDE)
    response = ask(engine, path, {**request(path), field: make(most)})
    assert response.status_code == 200, response.text
    refused = FakeEngine(says("ok"), info=WIDE)
    response = ask(refused, path, {**request(path), field: make(most + 1)})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(field) and str(most) in message and str(most + 1) in message
    assert not refused.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_biases_of_exactly_the_limit(path: str) -> None:
    for count, status in ((9, 200), (10, 400)):
        body = {**request(path), "logit_bias": biases(count)}
        assert ask(FakeEngine(says("ok")), path, body, max_logit_bias=9).status_code == status


def test_top_logprobs_of_a_chat() -> None:
    for count, status in ((CONFIG.max_logprobs, 200), (CONFIG.max_logprobs + 1, 400)):
        body = {**request(CHAT), "logprobs": True, "top_logprobs": count}
        assert ask(FakeEngine(says("ok")), CHAT, body).status_code == status


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_choices_of_exactly_the_limit(path: str) -> None:
    for count, status in ((MAX_CHOICES, 200), (MAX_CHOICES + 1, 400)):
        choice = [str(i) for i in range(count)]
        body = {**request(path), "structured_outputs": {"choice": choice}}
        response = ask(FakeEngine(says("1")), path, body)
        assert response.status_code == status, response.text
