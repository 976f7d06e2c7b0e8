"""Where an answer in one piece is made: a large one off the event loop, which serves others meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pegainfer.frontend.http import flow, text_routes
from pegainfer.frontend.http.front import INLINE_BYTES
from tests.support.asgi import ask
from tests.support.fake_engine import FakeEngine, says
from tests.support.scripted import LONG

WORDS = "a" * 1000


@pytest.mark.parametrize(
    ("path", "body", "large"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 10, "logprobs": 3}, False),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000, "logprobs": 3}, False),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000, "logprobs": 20}, True),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1000, "n": 5}, True),
        ("/v1/completions", {"prompt": WORDS, "max_tokens": 1, "prompt_logprobs": 20}, True),
        ("/v1/completions", {"prompt": WORDS, "max_tokens": 1, "echo": True, "logprobs": 20}, True),
        ("/v1/embeddings", {"input": "a"}, False),
        ("/v1/embeddings", {"input": ["a"] * (INLINE_BYTES // 3 + 1)}, True),
        ("/tokenize", {"prompt": WORDS}, False),
        ("/tokenize", {"prompt": WORDS * 5, "return_token_strs": True}, True),
    ],
)
def test_a_large_answer_is_made_off_the_event_loop(
    path: str, body: dict[str, Any], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[int] = []

    def noting(value: Any) -> bytes:
        where.append(threading.get_ident())
        return encode(value)

    encode = flow.encode
    for module in (flow, text_routes):
        monkeypatch.setattr(module, "encode", noting)
    engine = FakeEngine(says(WORDS), info=LONG)
    answer = ask(engine, path, body, max_prompts=1 << 12, max_queued_requests=1 << 12)
    assert answer.status_code == 200, answer.text
    assert [ident != threading.get_ident() for ident in where] == [large]
