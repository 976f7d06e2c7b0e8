"""The context filled to its last token on every route, over the whole engine."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any, NamedTuple

import pytest

from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.null.model import NullModel
from tests.support.asgi import TEMPLATE, TOKENIZER, client, events, named_events, stream_text
from tests.support.null_engine import null_engine

CONTEXT = 128  # tokens
NOON = datetime.datetime(2026, 1, 1, 12)
EMBEDDINGS, COUNT = "/v1/embeddings", "/v1/messages/count_tokens"


def around(*roles: str) -> int:
    """Tokens of a chat whose messages are empty."""
    text = TEMPLATE.render([{"role": role, "content": ""} for role in roles], now=NOON)
    return len(TOKENIZER.encode(text, add_special_tokens=False))


class Route(NamedTuple):
    path: str
    prompt: str  # field of the prompt
    most: str  # field of the bound on the answer
    is_chat: bool = True

    def body(self, tokens: int, most: int | None = None) -> dict[str, Any]:
        """A request whose prompt has so many tokens, a byte each."""
        text = "a" * (tokens - around("user") if self.is_chat else tokens)
        messages = [{"role": "user", "content": text}]
        body: dict[str, Any] = {self.prompt: messages if self.prompt == "messages" else text}
        return body if most is None else {**body, self.most: most}


ROUTES = [
    Route("/v1/completions", "prompt", "max_tokens", is_chat=False),
    Route("/v1/chat/completions", "messages", "max_completion_tokens"),
    Route("/v1/chat/completions", "messages", "max_tokens"),
    Route("/v1/responses", "input", "max_output_tokens"),
    Route("/v1/messages", "messages", "max_tokens"),
]
routes = pytest.mark.parametrize("route", ROUTES, ids=lambda r: f"{r.path}-{r.most}")


def ask_null(path: str, body: dict[str, Any]) -> Any:
    """Status and JSON of one answer, or the text of a stream. The model says nothing but 'a'."""
    model = NullModel(next_token=lambda tokens, num_prompt, seed: 97)

    async def main() -> Any:
        with null_engine(model=model, max_model_len=CONTEXT, num_blocks=(64,)) as engine:
            app = create_app(engine, TOKENIZER, TEMPLATE, HttpConfig())
            async with client(app) as http:
                response = await http.post(path, content=json.dumps(body).encode())
                return response.status_code, response.text if body.get("stream") else response.json()

    return asyncio.run(asyncio.wait_for(main(), 110))


def told(answer: dict[str, Any]) -> tuple[int, int, str]:
    """Tokens of prompt and answer by usage, and why the answer ended, of any route."""
    usage = answer["usage"]
    sizes = [
        usage[n]
        for n in ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
        if n in usage
    ]
    if "choices" in answer:
        reason = answer["choices"][0]["finish_reason"]
    elif "stop_reason" in answer:
        # Anthropic tells the two bounds apart.
        used_up = sizes[0] + sizes[1] == CONTEXT and answer["stop_reason"] == "model_context_window_exceeded"
        reason = "length" if used_up or answer["stop_reason"] == "max_tokens" else answer["stop_reason"]
    else:
        assert answer["status"] == "incomplete"
        reason = {"max_output_tokens": "length"}[answer["incomplete_details"]["reason"]]
    return sizes[0], sizes[1], reason


@routes
@pytest.mark.parametrize(
    ("prompt", "most", "wanted"),
    [
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 1, 2, 1),  # a bound beyond the context is one all the same
        (CONTEXT - 20, 19, 19),
        (CONTEXT - 20, 20, 20),
        (CONTEXT - 20, 21, 20),
        (CONTEXT - 20, CONTEXT, 20),
    ],
)
def test_an_answer_fills_the_context_exactly(route: Route, prompt: int, most: int, wanted: int) -> None:
    status, answer = ask_null(route.path, route.body(prompt, most))
    assert status == 200, answer
    assert told(answer) == (prompt, wanted, "length")


@routes
def test_without_a_bound_the_answer_ends_with_the_context(route: Route) -> None:
    most = -1 if route.path == "/v1/completions" else None  # its default is 128
    assert told(ask_null(route.path, route.body(CONTEXT - 20, most))[1]) == (CONTEXT - 20, 20, "length")


@pytest.mark.parametrize(("most", "reason"), [(20, "max_tokens"), (21, "model_context_window_exceeded")])
def test_messages_tells_which_of_the_two_bounds_ended_an_answer(most: int, reason: str) -> None:
    body = Route("/v1/messages", "messages", "max_tokens").body(CONTEXT - 20, most)
    assert ask_null("/v1/messages", body)[1]["stop_reason"] == reason


@routes
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_prompt_that_leaves_no_room_is_refused(route: Route, beyond: int) -> None:
    """It may be the whole context less one token."""
    status, answer = ask_null(route.path, route.body(CONTEXT + beyond, 1))
    assert status == 400, answer
    if route.path == "/v1/messages":
        assert (
            answer["error"]["message"]
            == f"prompt is too long: {CONTEXT + beyond} tokens > {CONTEXT - 1} maximum"
        )
    else:
        assert answer["error"]["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in answer["error"]["message"]


@routes
@pytest.mark.parametrize("prompt", [CONTEXT - 20, CONTEXT - 1])
def test_a_stream_fills_it_as_well(route: Route, prompt: int) -> None:
    status, text = ask_null(route.path, {**route.body(prompt, CONTEXT), "stream": True})
    wanted = "a" * (CONTEXT - prompt)
    assert status == 200
    if route.path == "/v1/messages":
        named = named_events(text)
        assert "".join(d["delta"]["text"] for n, d in named if n == "content_block_delta") == wanted
        assert named[-2][1]["delta"]["stop_reason"] == "model_context_window_exceeded"
    elif route.path == "/v1/responses":
        named = named_events(text)
        assert "".join(d["delta"] for n, d in named if n == "response.output_text.delta") == wanted
        assert named[-1][0] == "response.incomplete"
    else:
        chunks = events(text)
        assert stream_text(chunks) == wanted
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("keep", "status"), [(1, 200), (CONTEXT - 1, 200), (CONTEXT, 400), (-1, 200)])
def test_a_prompt_truncated_to_the_longest_that_fits(keep: int, status: int) -> None:
    body = {"prompt": "b" * 5 + "a" * 300, "truncate_prompt_tokens": keep, "max_tokens": 4}
    found, answer = ask_null("/v1/completions", body)
    assert found == status, answer
    if status == 200:
        kept = CONTEXT - 1 if keep == -1 else keep
        assert told(answer) == (kept, min(4, CONTEXT - kept), "length")


@pytest.mark.parametrize(("tokens", "status"), [(CONTEXT - 1, 200), (CONTEXT, 400)])
def test_the_longest_text_that_is_embedded(tokens: int, status: int) -> None:
    found, answer = ask_null(EMBEDDINGS, {"input": [[97] * tokens, [97]]})
    assert found == status, answer
    if status == 400:
        assert (answer["error"]["code"], answer["error"]["param"]) == ("context_length_exceeded", "input[0]")


@pytest.mark.parametrize("tokens", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_what_is_only_counted_may_be_longer(tokens: int) -> None:
    chat = Route(COUNT, "messages", "max_tokens").body(tokens)
    assert ask_null(COUNT, chat) == (200, {"input_tokens": tokens})
    assert ask_null("/tokenize", {"prompt": "a" * tokens})[1]["count"] == tokens
    responses = Route("/v1/responses/input_tokens", "input", "max_output_tokens").body(tokens)
    assert ask_null("/v1/responses/input_tokens", responses)[1]["input_tokens"] == tokens


@pytest.mark.parametrize(("tokens", "status"), [(CONTEXT, 200), (CONTEXT + 1, 400)])
def test_a_prompt_that_is_only_scored_may_be_the_whole_context(tokens: int, status: int) -> None:
    body = {"prompt": [97] * tokens, "echo": True, "logprobs": 1, "max_tokens": 0}
    found, answer = ask_null("/v1/completions", body)
    assert found == status, answer
    if status == 200:
        assert told(answer) == (CONTEXT, 0, "length")
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[0] is None and len(logprobs) == CONTEXT and None not in logprobs[1:]
    else:
        assert f"expected ≤ {CONTEXT} tokens, got {CONTEXT + 1}" in answer["error"]["message"]


def test_min_tokens_beyond_the_context() -> None:
    """The context ends the answer first."""
    body = {"prompt": "a" * (CONTEXT - 20), "max_tokens": 30, "min_tokens": 30}
    status, answer = ask_null("/v1/completions", body)
    assert (status, told(answer)) == (200, (CONTEXT - 20, 20, "length"))


def test_the_next_turn_of_a_chat_that_has_just_room() -> None:
    """History and question make the longest prompt that fits."""
    rest = CONTEXT - 1 - around("system", "user")
    for more, status in ((0, 200), (1, 400)):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a" * (rest - 1 + more)}]
        assert ask_null("/v1/chat/completions", {"messages": messages, "max_tokens": 9})[0] == status
