"""POST /v1/embeddings: a vector a text, pooled from the model's hidden states."""

from __future__ import annotations

import base64
import math
import sys
import time
from array import array
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.contract.request import SamplingParams
from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.flow import send_body
from pegainfer.frontend.http.answer.generation import Generation, Prompt
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.fields import GenerateFields, Hints
from pegainfer.frontend.http.request.jobs import Common, build_prompt, common, prompt_ids, prompt_sources
from pegainfer.frontend.http.request.neutral import refuse_unserved
from pegainfer.frontend.own_pooling import Pooling


class EmbeddingRequest(Hints, kw_only=True):
    """Null means the same as absent."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None  # absent: float
    pooling: Pooling | None = None  # absent: the server's
    normalize: bool | None = None  # scale each vector to length 1; absent: true unless the model says no
    add_special_tokens: bool | None = None  # absent: true, as for completions
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    # Known of OpenAI's API and not served, see GenerateFields.
    dimensions: Any = None


class Embedding(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str  # base64 of float32, little-endian


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embeddings(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises what the checks and `send_body` raise."""
    arrival = time.monotonic()
    request, size = await read_request(scope, receive, EmbeddingRequest, front.config)
    front.check_model(request.model)
    refuse_unserved(request)
    shared = common(_plain(request), front, arrival)
    prompts = await front.text_work(size, lambda: _prompts(front, request, shared))
    generation = front.generation(shared.id, prompts, arrival)
    await send_body(front, generation, EmbeddingAnswer(front, generation, request), receive, send)


def _plain(r: EmbeddingRequest) -> GenerateFields:
    """The fields that it shares with other routes, as these have them."""
    names = ("model", "truncate_prompt_tokens", "user", "priority", "cache_salt", "request_id", "timeout")
    return GenerateFields(**{name: getattr(r, name) for name in names})


def _prompts(front: Front, r: EmbeddingRequest, shared: Common) -> list[Prompt]:
    params = pooled(front, r.pooling)
    plain = _plain(r)
    sources = prompt_sources(r.input, "input", front)
    special = r.add_special_tokens is not False
    out: list[Prompt] = []
    for number, source in enumerate(sources):
        param = "input" if len(sources) == 1 else f"input[{number}]"
        ids = prompt_ids(source, plain, front, param, special=special)
        out.append(build_prompt(front, plain, shared, params, ids, number=number))
    return out


def pooled(front: Front, asked: Pooling | None) -> SamplingParams:
    """The engine's parameters of a prompt whose vector is wanted. Raises UnsupportedError."""
    pooling = front.own_pooling.choose(asked or front.config.pooling)
    return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling=pooling)


def vector(prompt: Prompt, *, normalize: bool) -> array[float]:
    """The float32 numbers of a prompt that has ended. Raises ApiError (500) where one is not finite."""
    assert prompt.embedding is not None
    values = array("f")
    values.frombytes(prompt.embedding)
    if sys.byteorder == "big":
        values.byteswap()
    if not all(map(math.isfinite, values)):
        raise ApiError(500, "the model's hidden states are not finite")
    length = math.hypot(*values) if normalize else 1.0
    return array("f", [v / length for v in values]) if length else values


class EmbeddingAnswer:
    """Implements flow.Body."""

    def __init__(self, front: Front, generation: Generation, r: EmbeddingRequest) -> None:
        self._model = front.answered_name(generation.adapter)
        self._generation = generation
        self._normalize = front.own_pooling.normalize if r.normalize is None else r.normalize
        self._base64 = r.encoding_format == "base64"

    def take(self, delta: Delta) -> None:
        """The one token of a prompt is nobody's; its vector stands in the prompt. Raises ApiError (503)."""
        if delta.finish == "abort":
            raise ApiError(503, "the request was aborted", code="aborted")

    def body(self) -> EmbeddingList:
        generation = self._generation
        data = [Embedding(index=i, embedding=self._vector(p)) for i, p in enumerate(generation.prompts)]
        usage = EmbeddingUsage(generation.prompt_tokens, generation.prompt_tokens)
        return EmbeddingList(data=data, model=self._model, usage=usage)

    def _vector(self, prompt: Prompt) -> list[float] | str:
        values = vector(prompt, normalize=self._normalize)
        if not self._base64:
            return values.tolist()
        if sys.byteorder == "big":
            values.byteswap()
        return base64.b64encode(values.tobytes()).decode()
