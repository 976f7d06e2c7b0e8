"""Embeddings of the offline API: a prompt's hidden states as one vector."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from typing import Literal

from pegainfer.app.prompts import Prompt
from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.event import FinishReason, TokenEvent, error_of
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens

POOLINGS = ("mean", "last")


@dataclass(frozen=True)
class EmbeddingOutput:
    """One vector: [hidden size] float32."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt with its vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int


class EmbeddingRequest:
    """A prompt whose vector is asked for. Mutated by `take`."""

    num_tokens = 0  # nothing is generated

    def __init__(
        self, request_id: str, prompt: Prompt, pooling: Literal["mean", "last"], normalize: bool
    ) -> None:
        """Raises RequestError for an unknown pooling."""
        if pooling not in POOLINGS:
            raise RequestError(
                "bad pooling", expected=" or ".join(POOLINGS), got=f"{pooling!r:.80}", param="pooling"
            )
        self.id = request_id
        self._prompt = prompt
        self._pooling: Literal["mean", "last"] = pooling
        self._normalize = normalize
        self._vector: list[float] = []
        self._cached = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    def to_engine(self) -> GenerateRequest:
        """The vector comes with the finish of a request for one token."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, pooling=self._pooling)
        return GenerateRequest(id=self.id, prompt=pack_tokens(self._prompt.ids), sampling=params)

    def take(self, event: TokenEvent) -> tuple[bool, bool]:
        """As Request.take. Raises what an ERROR event stands for, PegaError without a finite vector."""
        if event.finish is FinishReason.ERROR:
            raise error_of(event)
        self._cached = max(self._cached, event.num_cached_tokens)
        if event.finish is None:
            return False, False
        if event.embedding is None:
            raise PegaError("the engine gave no embedding")
        values = array("f")
        values.frombytes(event.embedding)
        if sys.byteorder == "big":
            values.byteswap()
        if not all(map(math.isfinite, values)):
            raise PegaError("the model's hidden states are not finite")
        length = math.hypot(*values) if self._normalize else 1.0
        self._vector = [v / (length or 1.0) for v in values]
        return True, False

    def output(self) -> EmbeddingRequestOutput:
        """The answer, once `take` has said that it is there."""
        return EmbeddingRequestOutput(
            self.id, self._prompt.ids, EmbeddingOutput(self._vector), True, self._cached
        )
