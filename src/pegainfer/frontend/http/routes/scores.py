"""POST /v1/score and /v1/rerank: how well texts fit each other, in vLLM's and Jina's shapes."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_json
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.fields import Hints
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.http.request.neutral import refuse_unserved
from pegainfer.frontend.http.routes.scoring import Scored, score_pairs


class _Fields(Hints, kw_only=True):
    """Null means the same as absent."""

    model: str | None = None
    instruction: str | None = None  # of the yes-or-no question; absent: Qwen3-Reranker's own
    truncate_prompt_tokens: int | None = None  # a longer prompt loses the end of its document
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    max_tokens_per_doc: Any = None


class ScoreRequest(_Fields, kw_only=True):
    """One text or as many as of the other kind on the left; one or many on the right."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None  # another name of text_1
    documents: str | list[str] | None = None  # another name of text_2


class DocumentText(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(_Fields, kw_only=True):
    query: str
    documents: list[str | DocumentText]
    top_n: int | None = None  # absent or 0: all
    return_documents: bool | None = None  # absent: true


class ScoreUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int  # seconds of the wall clock
    model: str
    data: list[Score]
    usage: ScoreUsage


class RerankResult(msgspec.Struct, kw_only=True):
    index: int  # in the request's documents
    document: DocumentText | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Reranked(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]  # the best first
    usage: ScoreUsage


async def score(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """A score for each pair of texts. Raises what the checks raise and what the engine fails with."""
    arrival = time.monotonic()
    request, size = await read_request(scope, receive, ScoreRequest, front.config)
    front.check_model(request.model)
    refuse_unserved(request)
    lefts, left_name = _texts(request, "text_1", "queries")
    rights, right_name = _texts(request, "text_2", "documents")
    at_most(right_name, len(rights), front.config.max_prompts, "texts")
    if len(lefts) not in (1, len(rights)):
        raise bad_value(left_name, f"one text, or {len(rights)} as {right_name} has", len(lefts))
    pairs = [(left, right) for left, right in zip(_spread(lefts, len(rights)), rights, strict=True)]
    scored = await score_pairs(front, request, pairs, size, arrival, receive, (left_name, right_name))
    answer = ScoreList(
        id=f"score-{scored.id}",
        created=int(time.time()),
        model=scored.model,
        data=[Score(index=i, score=value) for i, value in enumerate(scored.scores)],
        usage=_usage(scored),
    )
    await send_json(send, answer)


async def rerank(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """The documents in the order of their scores. Raises as `score`."""
    arrival = time.monotonic()
    request, size = await read_request(scope, receive, RerankRequest, front.config)
    front.check_model(request.model)
    refuse_unserved(request)
    texts = [d if isinstance(d, str) else d.text for d in request.documents]
    if not texts:
        raise bad_value("documents", "at least one text", "none")
    at_most("documents", len(texts), front.config.max_prompts, "texts")
    top = request.top_n or len(texts)
    if top < 0:
        raise bad_value("top_n", "≥ 0", top)
    pairs = [(request.query, text) for text in texts]
    scored = await score_pairs(front, request, pairs, size, arrival, receive, ("query", "documents"))
    best = sorted(range(len(texts)), key=lambda i: -scored.scores[i])[:top]
    shown = request.return_documents is not False
    results = [
        RerankResult(
            index=i,
            document=DocumentText(texts[i]) if shown else msgspec.UNSET,
            relevance_score=scored.scores[i],
        )
        for i in best
    ]
    answer = Reranked(id=f"rerank-{scored.id}", model=scored.model, results=results, usage=_usage(scored))
    await send_json(send, answer)


def _texts(request: ScoreRequest, name: str, other: str) -> tuple[list[str], str]:
    """The texts of a field with two names, and the name that was used. Raises ApiError (400)."""
    given = [n for n in (name, other) if getattr(request, n) is not None]
    if len(given) != 1:
        raise bad_value(name, f"{name} or {other}", "both" if given else "none")
    value = getattr(request, given[0])
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise bad_value(given[0], "at least one text", "none")
    return texts, given[0]


def _spread(texts: list[str], count: int) -> list[str]:
    return texts * count if len(texts) == 1 else texts


def _usage(scored: Scored) -> ScoreUsage:
    return ScoreUsage(scored.prompt_tokens, scored.prompt_tokens)
