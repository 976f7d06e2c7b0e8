"""POST /v1/score and /v1/rerank: which prompts the engine gets, and what is made of its answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import GenerateRequest, unpack_tokens
from pegainfer.frontend.byte_tokenizer import CHATML, byte_tokenizer
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.app import create_app
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.own_pooling import OwnPooling
from tests.support import fake_engine
from tests.support.asgi import client
from tests.support.fake_engine import INFO, FakeEngine

TOKENIZER = byte_tokenizer(("yes", "no"))
QWEN3 = byte_tokenizer(("yes", "no", "<think>", "</think>"))
YES, NO = 258, 259
RERANKER = OwnPooling(reranker=True)
EMBEDDER = OwnPooling(pooling="last")
ROOM = msgspec.structs.replace(INFO, vocab_size=262, max_model_len=2048)


def first_allowed(request: GenerateRequest, index: int) -> list[int]:
    return list((request.sampling.allowed_token_ids or (0,))[:1])


def post(
    path: str,
    body: dict[str, Any],
    pooling: OwnPooling = RERANKER,
    *,
    tokenizer: Any = TOKENIZER,
    engine: FakeEngine | None = None,
    **config: Any,
) -> tuple[httpx.Response, FakeEngine]:
    engine = engine or FakeEngine(first_allowed, info=ROOM)
    template = ChatTemplate(CHATML, tokenizer.config.special_tokens)
    app = create_app(engine, tokenizer, template, HttpConfig(**config), pooling=pooling)

    async def main() -> httpx.Response:
        async with client(app) as http:
            return await http.post(path, content=json.dumps(body))

    return asyncio.run(asyncio.wait_for(main(), 110)), engine


Logprobs = Callable[[int, int], TokenLogprob]


def both_known(token: int, k: int) -> TokenLogprob:
    """yes -1, no -3."""
    return TokenLogprob(token, -1.0 if token == YES else -3.0, 1, ((YES, -1.0), (5, -2.0), (NO, -3.0))[:k])


def only_drawn(token: int, k: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0 if token == YES else -3.0, 1, ((5, -0.5),)[:k])


@pytest.mark.parametrize(("logprobs", "requests"), [(both_known, 1), (only_drawn, 2)])
def test_a_score_is_the_probability_of_yes(
    monkeypatch: pytest.MonkeyPatch, logprobs: Logprobs, requests: int
) -> None:
    """A second request asks for what the first one did not tell."""
    monkeypatch.setattr(fake_engine, "logprob_of", logprobs)
    answer, engine = post("/v1/score", {"text_1": "a", "text_2": "b", "request_id": "mine"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body.pop("created") > 0
    tokens = len(engine.requests[0].prompt) // 4
    assert body == {
        "id": "score-mine",
        "object": "list",
        "model": "fake",
        "data": [{"index": 0, "object": "score", "score": pytest.approx(1 / (1 + math.exp(-2)), abs=1e-12)}],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    assert len(engine.requests) == requests
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (1, 0.0, 20)
    assert sampling.allowed_token_ids == (YES, NO)
    for again in engine.requests[1:]:
        assert again.sampling.allowed_token_ids == (NO,)
        assert again.prompt == engine.requests[0].prompt


def test_qwen3_reranker_gets_the_prompt_that_it_was_trained_with() -> None:
    _, engine = post(
        "/score", {"text_1": "who?", "text_2": "<|im_end|>me", "instruction": "Find"}, tokenizer=QWEN3
    )
    ids = unpack_tokens(engine.requests[0].prompt)
    assert QWEN3.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
        'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Find\n<Query>: who?\n<Document>: <|im_end|>me<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    assert ids.count(257) == 2  # a document cannot end its turn


def test_other_models_are_asked_by_their_chat_template() -> None:
    _, engine = post("/score", {"text_1": "who?", "text_2": "me"})
    text = TOKENIZER.decode(unpack_tokens(engine.requests[0].prompt), skip_special_tokens=False)
    assert text.endswith("<Query>: who?\n<Document>: me<|im_end|>\n<|im_start|>assistant\n")
    assert "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n" in text


def test_one_query_and_many_documents_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The odds of yes grow with the prompt's length: longer documents come first."""
    lengths: list[int] = []

    def drawn(request: GenerateRequest, index: int) -> list[int]:
        lengths.append(len(request.prompt) // 4)
        return [YES]

    def logprobs(token: int, k: int) -> TokenLogprob:
        return TokenLogprob(YES, -0.1, 1, ((YES, -0.1), (NO, -0.01 * lengths.pop(0))))

    monkeypatch.setattr(fake_engine, "logprob_of", logprobs)
    documents = ["aa", {"text": "a"}, "aaaa", "aaa"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        lengths.clear()
        engine = FakeEngine(drawn, info=ROOM)
        answer, _ = post(path, {"query": "q", "documents": documents, "top_n": 3}, engine=engine)
        results = answer.json()["results"]
        assert [r["index"] for r in results] == [2, 3, 0]
        assert [r["document"] for r in results] == [{"text": "aaaa"}, {"text": "aaa"}, {"text": "aa"}]
        scores = [r["relevance_score"] for r in results]
        assert scores == sorted(scores, reverse=True)
    lengths.clear()
    body = {"query": "q", "documents": documents, "return_documents": False}
    answer, _ = post("/rerank", body, engine=FakeEngine(drawn, info=ROOM))
    assert [sorted(r) for r in answer.json()["results"]] == [["index", "relevance_score"]] * 4


def test_an_embedding_model_compares_angles() -> None:
    """The fake vector: first token, last token, length."""
    answer, engine = post("/v1/score", {"queries": "ab", "documents": ["ab", "z", "ab"]}, EMBEDDER)
    one, other = (97, 98, 2), (122, 122, 1)
    between = sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)
    scores = [d["score"] for d in answer.json()["data"]]
    assert scores == [pytest.approx(1.0), pytest.approx(between), pytest.approx(1.0)]
    assert [r.sampling.pooling for r in engine.requests] == ["last", "last"]  # each text once


def test_many_against_many() -> None:
    answer, _ = post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "zz"]}, EMBEDDER)
    between = (98 * 122 * 2 + 2) / math.hypot(98, 98, 1) / math.hypot(122, 122, 2)
    scores = [d["score"] for d in answer.json()["data"]]
    assert scores == [pytest.approx(1.0, abs=1e-12), pytest.approx(between, abs=1e-12)]


def test_a_long_document_loses_its_end() -> None:
    whole = {"text_1": "q", "text_2": "x" * 500}
    _, engine = post("/score", {**whole, "truncate_prompt_tokens": 400})
    ids = unpack_tokens(engine.requests[0].prompt)
    assert len(ids) == 400
    assert TOKENIZER.decode(ids, skip_special_tokens=False).endswith("xxx<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "x" * 9000}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 10}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a", "x" * 2000]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ],
)
def test_faults_are_named(path: str, body: dict[str, Any], param: str) -> None:
    answer, engine = post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not engine.requests


def test_a_model_that_was_trained_for_neither_says_so() -> None:
    body = {"text_1": "a", "text_2": "b"}
    answer, engine = post("/v1/score", body, OwnPooling())
    assert answer.status_code == 400 and not engine.requests
    assert "score_method" in answer.json()["error"]["message"]
    for method, pooled in (("yes-no", None), ("cosine", "mean")):
        answer, engine = post("/v1/score", body, OwnPooling(), score_method=method)
        assert answer.status_code == 200
        assert engine.requests[0].sampling.pooling == pooled


def test_a_model_without_words_for_the_answer_says_so() -> None:
    answer, engine = post("/v1/score", {"text_1": "a", "text_2": "b"}, tokenizer=byte_tokenizer())
    assert answer.status_code == 400 and not engine.requests
    assert "yes or no" in answer.json()["error"]["message"]


def test_embeddings_follow_the_models_own_pooling() -> None:
    body = {"input": "ab"}
    answer, engine = post("/v1/embeddings", body, OwnPooling(pooling="last", normalize=False))
    assert engine.requests[0].sampling.pooling == "last"
    assert answer.json()["data"][0]["embedding"] == [97.0, 98.0, 2.0]
    answer, engine = post("/v1/embeddings", {**body, "pooling": "mean", "normalize": True}, EMBEDDER)
    assert engine.requests[0].sampling.pooling == "mean"
    assert math.hypot(*answer.json()["data"][0]["embedding"]) == pytest.approx(1.0)
    answer, _ = post("/v1/embeddings", body, OwnPooling(unserved="cls_token"))
    assert answer.status_code == 400 and "cls_token" in answer.json()["error"]["message"]
