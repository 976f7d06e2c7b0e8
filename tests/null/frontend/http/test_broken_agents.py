"""The kinds of requests that broke real servers, at the routes of agents, on the whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.null.model import NullModel
from tests.null.frontend.http.test_broken_requests import CHAT, alphabet, server
from tests.support.asgi import Call, events, named_events, run, stream_text

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "Here is the English alphabet: ABC"}
LETTERS = "DEFGHIJKLMNOPQRSTUVWXYZ"  # what the null model answers with
ALPHABET = NullModel(next_token=lambda t, n, seed: ord("D") if len(t) == n else alphabet(t, n, seed))
BODIES: dict[str, dict[str, Any]] = {MESSAGES: {"messages": [USER]}, RESPONSES: {"input": [USER]}}
LIMITS = {MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


def text_of(path: str, body: bytes) -> str:
    """All that a stream shows."""
    if path == MESSAGES:
        deltas = [data["delta"] for name, data in named_events(body) if name == "content_block_delta"]
        return "".join(delta["text"] for delta in deltas)
    return "".join(data["delta"] for name, data in named_events(body) if name == "response.output_text.delta")


@pytest.mark.parametrize("path", BODIES)
def test_no_token_asked_for_is_a_fault_every_time(path: str) -> None:
    async def main() -> None:
        async with server() as (_, _, http):
            for _ in range(2):
                answer = await http.post(path, json={**BODIES[path], LIMITS[path]: 0})
                assert answer.status_code == 400 and LIMITS[path] in answer.text

    run(main)


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["GHI"], LETTERS[:3]), (["GHX", "XYZ"], LETTERS[:-3]), (["D"], ""), (["ZZ"], LETTERS)],
)
def test_no_piece_of_a_stop_sequence_is_shown_in_a_chat(stops: list[str], shown: str) -> None:
    async def main() -> None:
        async with server(model=ALPHABET) as (app, _, http):
            body = {"messages": [USER], "temperature": 0, "stop": stops, "max_tokens": 50}
            call = Call(app, CHAT, {**body, "stream": True})
            await call.task
            (choice,) = (await http.post(CHAT, json=body)).json()["choices"]
            assert stream_text(events(call.body)) == choice["message"]["content"] == shown
            assert choice["finish_reason"] == "stop"

    run(main)


@pytest.mark.parametrize(
    ("stops", "shown"),
    [(["GHI"], LETTERS[:3]), (["GHX", "XYZ"], LETTERS[:-3]), (["D"], ""), (["ZZ"], LETTERS)],
)
def test_no_piece_of_a_stop_sequence_is_shown(stops: list[str], shown: str) -> None:
    async def main() -> None:
        async with server(model=ALPHABET) as (app, _, http):
            body = {**BODIES[MESSAGES], "temperature": 0, "stop_sequences": stops, "max_tokens": 50}
            call = Call(app, MESSAGES, {**body, "stream": True})
            await call.task
            whole = (await http.post(MESSAGES, json=body)).json()
            texts = [block["text"] for block in whole["content"]]
            assert text_of(MESSAGES, call.body) == "".join(texts) == shown
            found = next((s for s in stops if s in LETTERS), None)
            assert whole["stop_sequence"] == found
            assert whole["stop_reason"] == ("end_turn" if found is None else "stop_sequence")

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_clients_that_leave_after_the_first_event(path: str) -> None:
    async def main() -> None:
        # Steps that take time: engine and server share this process, and no answer may end before its client
        # has left.
        async with server(step_seconds=0.001) as (app, _, _):
            for _ in range(60):
                call = Call(app, path, {**BODIES[path], "stream": True, "ignore_eos": True})
                await call.until(lambda call=call: bool(call.writes))
                call.disconnect()
                await call.task
            assert app.num_live == 0 and len(app.front.responses) == 0

    run(main)


@pytest.mark.parametrize("path", BODIES)
def test_an_over_long_prompt_gives_both_lengths(path: str) -> None:
    long = {"role": "user", "content": "x" * 5000}
    body = {"messages": [long]} if path == MESSAGES else {"input": [long]}

    async def main() -> None:
        async with server() as (_, _, http):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400
            assert "4095" in answer.text and "50" in answer.text

    run(main)
