"""Where an answer in one piece is made: a large one off the event loop, which serves others meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pegainfer.frontend.http.answer import flow
from pegainfer.frontend.http.front import INLINE_BYTES, LARGE_BYTES
from pegainfer.frontend.http.routes import text_routes
from tests.support.asgi import ask, make_app, run
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


def test_of_the_largest_texts_one_is_worked_on_at_a_time() -> None:
    async def main() -> None:
        front = make_app(FakeEngine()).front
        begun: list[str] = []
        first_begun, go_on = threading.Event(), threading.Event()

        def work(name: str) -> None:
            begun.append(name)
            first_begun.set()
            assert name != "first" or go_on.wait(60)

        def start(name: str, size: int, stage: str = "tokenize") -> asyncio.Future[None]:
            return asyncio.ensure_future(front.text_work(size, lambda: work(name), stage))

        large = [start(name, LARGE_BYTES + 1) for name in ("first", "second")]
        assert await asyncio.to_thread(first_begun.wait, 60)
        await start("short", INLINE_BYTES)
        await start("long", LARGE_BYTES)
        await start("answer", LARGE_BYTES + 1, "detokenize")
        assert sorted(begun) == ["answer", "first", "long", "short"]
        go_on.set()
        await asyncio.gather(*large)
        assert begun[-1] == "second"

    run(main)
