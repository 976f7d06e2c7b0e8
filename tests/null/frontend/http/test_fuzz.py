"""Any JSON at all: a 200 or a 4xx with a reason, never a 500, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegainfer.frontend.http.request.conversation import ChatRequest
from pegainfer.frontend.http.routes.completions import CompletionRequest
from tests.support.asgi import client, events, make_app
from tests.support.null_engine import null_engine

numbers = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**63, 2**64, 1e308, -0.0])
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)

# Values that mostly pass the first checks, so that the later ones and the engine are reached.
ids = st.integers(0, 257) | st.integers(-1, 258)
words = st.text("abc é😀", min_size=1, max_size=6) | texts
Known = dict[str, st.SearchStrategy[Any]]
LIKELY: Known = {
    "model": st.sampled_from([None, "null"]),
    "prompt": words | st.lists(words, min_size=1, max_size=3) | st.lists(ids, min_size=1, max_size=5),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": texts}),
        min_size=1,
        max_size=3,
    ),
    "max_tokens": st.integers(0, 6),
    "max_completion_tokens": st.just(3),
    "min_tokens": st.integers(0, 3),
    "n": st.integers(1, 4),
    "stop": words | st.lists(words, max_size=3),
    "stop_token_ids": st.lists(ids, max_size=4),
    "allowed_token_ids": st.lists(ids, max_size=4),
    "logit_bias": st.dictionaries(ids.map(str), st.floats(-100, 100), max_size=3),
    "bad_words": st.lists(words, max_size=3),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "temperature": st.floats(0, 2.0),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "top_k": st.integers(-2, 10),
    "seed": st.integers(-(2**63), 2**63),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 2),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "request_id": st.text("abc-", min_size=1, max_size=9),
    "cache_salt": texts,
    "user": texts,
    "priority": st.integers(-5, 5),
    "timeout": st.floats(30, 60),
    "truncate_prompt_tokens": st.integers(-1, 8),
    "chat_template_kwargs": st.dictionaries(texts | st.just("enable_thinking"), scalars, max_size=1),
}


def likely(field: msgspec.structs.FieldInfo, known: Known) -> st.SearchStrategy[Any]:
    if field.type is Any:  # not served: only null passes
        return st.none()
    return known.get(field.name, st.booleans())


@st.composite
def bodies(draw: st.DrawFn, kind: type[msgspec.Struct], needed: str, known: Known = LIKELY) -> dict[str, Any]:
    """A body with a few fields of the route; one in twenty has a value of any kind."""
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    body: dict[str, Any] = {needed: draw(known[needed])}
    bound = next((name for name in ("max_tokens", "max_output_tokens") if name in fields), None)
    if bound is not None:
        body[bound] = 3
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)):
        body[name] = draw(values if draw(st.integers(0, 19)) == 7 else likely(fields[name], known))
    return body


async def post(http: httpx.AsyncClient, path: str, body: Any) -> None:
    answer = await http.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        chunks = events(answer.text)
        assert chunks[-1] == "[DONE]"
        assert not any("error" in c for c in chunks[:-1])
        return
    whole = answer.json()
    assert (
        whole["usage"]["total_tokens"]
        == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]
    )
    assert all(c["finish_reason"] in ("stop", "length") for c in whole["choices"])


def run_all(path: str, batch: list[dict[str, Any]]) -> None:
    """Sends the bodies together to one server, then a normal request."""

    async def main() -> None:
        with null_engine(max_model_len=64) as engine:
            app = make_app(engine)  # type: ignore[arg-type]
            async with client(app) as http:
                await asyncio.gather(*(post(http, path, body) for body in batch))
                answer = await http.post(
                    "/v1/completions", json={"prompt": "a", "max_tokens": 2, "ignore_eos": True}
                )
                assert answer.json()["usage"]["completion_tokens"] == 2
                assert app.num_live == 0
                assert app.front.gate.waiting_requests == app.front.gate.waiting_tokens == 0
                assert (await http.get("/health")).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 60))


relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(st.lists(bodies(CompletionRequest, "prompt"), min_size=1, max_size=6))
def test_completions_take_any_json(batch: list[dict[str, Any]]) -> None:
    run_all("/v1/completions", batch)


@relaxed
@given(st.lists(bodies(ChatRequest, "messages"), min_size=1, max_size=6))
def test_chats_take_any_json(batch: list[dict[str, Any]]) -> None:
    run_all("/v1/chat/completions", batch)


@relaxed
@given(st.binary(max_size=200))
def test_bodies_take_any_bytes(body: bytes) -> None:
    async def main() -> None:
        with null_engine() as engine:
            async with client(make_app(engine)) as http:  # type: ignore[arg-type]
                for path in ("/v1/completions", "/tokenize"):
                    assert (await http.post(path, content=body)).status_code == 400

    asyncio.run(asyncio.wait_for(main(), 60))
