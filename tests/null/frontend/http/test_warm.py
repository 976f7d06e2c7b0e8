"""A chat whose earlier turns were answered before: what its next turn costs does not grow with its length."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from pegainfer.frontend.http.app import App, create_app
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import TEMPLATE, TOKENIZER, client
from tests.support.null_engine import null_engine

BLOCK = 16


def conversation(turns: int) -> list[dict[str, str]]:
    """Some 80 tokens a turn, none like another."""
    out = []
    for i in range(turns):
        out.append({"role": "user", "content": f"Question {i}: " + "x" * 30})
        out.append({"role": "assistant", "content": f"Answer {i}."})
    return [*out, {"role": "user", "content": "And then?"}]


async def ask(http: httpx.AsyncClient, messages: list[dict[str, str]]) -> Any:
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


@pytest.mark.parametrize("turns", [8, 80])
def test_a_turn_costs_its_own_tokens_one_step_and_its_own_text(turns: int) -> None:
    before = conversation(turns)
    answer, question = f"It was so, {turns} times.", f"Why {turns} times?"  # no other test's text
    after = [*before, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    own = f"<|im_start|>assistant\n{answer}", f"<|im_start|>user\n{question}"

    async def main(app: App) -> None:
        pieces = TOKENIZER.pieces
        async with client(app) as http:
            first = await ask(http, before)
            steps, chars, known = engine.stats().steps, pieces.chars, pieces.known_chars
            second = await ask(http, after)
        assert second["prompt_tokens"] > first["prompt_tokens"] > 70 * turns
        # All full blocks of what both have in common; the answer's own token is none of the next prompt's.
        cached = second["prompt_tokens_details"]["cached_tokens"]
        assert cached == first["prompt_tokens"] // BLOCK * BLOCK
        assert engine.stats().steps == steps + 1
        assert (pieces.chars - chars) - (pieces.known_chars - known) == sum(map(len, own))

    with null_engine(max_model_len=16_384, num_blocks=(2048,)) as engine:
        asyncio.run(main(create_app(engine, TOKENIZER, TEMPLATE, HttpConfig())))
