"""Structured output over HTTP, on the null engine: the forms, their faults, and what others notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from pegainfer.app.grammars import LLGuidanceGrammars
from pegainfer.frontend.grammar.vocabulary import vocabulary_of
from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TEMPLATE, TOKENIZER, client, events, run, stream_text
from tests.support.null_engine import null_engine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "?"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "ü"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Takes some seconds to compile.
SLOW = {
    "type": "object",
    "properties": {
        f"k{i}": {"type": "string", "pattern": f"^a{{{i % 50}}}b*[c-z]{{3}}$"} for i in range(4000)
    },
}
# Nested more deeply than a compiler's stack is.
DEEP = "start: r0\n" + "\n".join(f'r{i}: r{i + 1}? r{i + 1}? "a"' for i in range(4000)) + '\nr4000: "b"\n'


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@contextlib.asynccontextmanager
async def served(**config: Any) -> AsyncIterator[tuple[App, httpx.AsyncClient]]:
    grammars = LLGuidanceGrammars(lambda: vocabulary_of(TOKENIZER), 258)
    with null_engine(grammars=grammars) as engine:
        app = create_app(engine, TOKENIZER, TEMPLATE, HttpConfig(**config))
        try:
            async with client(app) as http:
                yield app, http
        finally:
            app.front.workers.close()


def text_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [c["message"]["content"] if "message" in c else c["text"] for c in answer.json()["choices"]]


def is_json(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


TAG = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}], "triggers": ["<f>"]}
FORMS: list[tuple[dict[str, Any], Any]] = [
    (response_format(SCHEMA), lambda t: is_json(t, SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, lambda t: is_json(t, SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda t: is_json(t, SCHEMA)),
    ({"structured_outputs": {"regex": r"[0-9]{3}-[a-f]+"}}, lambda t: re.fullmatch(r"[0-9]{3}-[a-f]+", t)),
    ({"structured_outputs": {"choice": ["ja", "nein", "ü"]}}, lambda t: t in ("ja", "nein", "ü")),
    ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]+/'}}, lambda t: re.fullmatch("a[0-9]+", t)),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, lambda t: re.fullmatch("a[0-9]+", t)),
    ({"structured_outputs": {"structural_tag": TAG}}, lambda t: "<f>" not in t or "<f>null</f>" in t),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_every_form_is_obeyed_streamed_and_not(path: str, number: int) -> None:
    fields, obeys = FORMS[number]
    body = {"messages": [USER]} if path == CHAT else {"prompt": "?", "temperature": 1}
    body |= {"max_tokens": 300, "seed": 5, **fields}

    async def main() -> None:
        async with served() as (_, http):
            whole = await http.post(path, json={**body, "n": 3})
            assert all(obeys(text) for text in text_of(whole))
            streamed = await http.post(path, json={**body, "stream": True})
            assert stream_text(events(streamed.text)) == text_of(whole)[0]

    run(main)


def test_a_json_object_is_one_or_the_limit_is_told() -> None:
    async def main() -> None:
        async with served() as (_, http):
            for fields in (
                {"response_format": {"type": "json_object"}},
                {"structured_outputs": {"json_object": True}},
            ):
                for seed in range(5):
                    body = {"messages": [USER], "max_tokens": 400, "seed": seed, **fields}
                    (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
                    if choice["finish_reason"] == "stop":
                        assert isinstance(json.loads(choice["message"]["content"]), dict)
                    else:
                        assert choice["finish_reason"] == "length"
                        assert choice["message"]["content"].startswith("{")

    run(main)


def test_stop_min_tokens_and_logprobs_hold_beside_a_schema() -> None:
    async def main() -> None:
        async with served() as (_, http):
            body = {"messages": [USER], "seed": 1, "max_tokens": 300, **response_format(SCHEMA)}
            stopped = (await http.post(CHAT, json={**body, "stop": '"b"'})).json()["choices"][0]
            assert stopped["finish_reason"] == "stop" and '"b"' not in stopped["message"]["content"]
            long = (await http.post(CHAT, json={**body, "min_tokens": 200})).json()["choices"][0]
            assert is_json(long["message"]["content"], SCHEMA)
            probed = (await http.post(CHAT, json={**body, "logprobs": True})).json()["choices"][0]
            spelt = bytes(b for e in probed["logprobs"]["content"] for b in e["bytes"]).decode()
            assert spelt == probed["message"]["content"]

    run(main)


def test_what_could_contradict_a_grammar_is_refused() -> None:
    async def main() -> None:
        async with served() as (_, http):
            for field in ({"allowed_token_ids": [97]}, {"bad_words": ["a"]}):
                body = {"messages": [USER], **field, **response_format(SCHEMA)}
                answer = await http.post(CHAT, json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == next(iter(field))

    run(main)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_served() -> None:
    async def main() -> None:
        async with served(grammar_seconds=0.5, worker_processes=1) as (_, http):
            slow = {"prompt": "?", "structured_outputs": {"json": SLOW}}
            good = {"prompt": "?", "structured_outputs": {"choice": ["yes"]}}
            for _ in range(2):
                refused = await http.post(COMPLETIONS, json=slow)
                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "structured_outputs.json"
                assert text_of(await http.post(COMPLETIONS, json=good)) == ["yes"]

    run(main)


def test_a_grammar_that_overflows_the_stack_ends_no_engine() -> None:
    async def main() -> None:
        async with served(worker_processes=1) as (_, http):
            refused = await http.post(
                COMPLETIONS, json={"prompt": "?", "structured_outputs": {"grammar": DEEP}}
            )
            assert refused.status_code == 400
            assert "nesting" in refused.json()["error"]["message"]
            good = {"prompt": "?", "structured_outputs": {"choice": ["yes"]}}
            assert text_of(await http.post(COMPLETIONS, json=good)) == ["yes"]

    run(main)


def test_free_requests_are_served_while_a_grammar_compiles() -> None:
    async def main() -> None:
        async with served(grammar_seconds=30.0, worker_processes=1) as (app, http):
            waiting = asyncio.ensure_future(
                http.post(COMPLETIONS, json={"prompt": "?", "structured_outputs": {"json": SLOW}})
            )
            for _ in range(5):
                assert text_of(await http.post(COMPLETIONS, json={"prompt": "?", "max_tokens": 3}))
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            app.front.workers.close()

    run(main)
