"""Scores of pairs of texts: by the probability of yes, or by the angle between two vectors.

A yes-or-no prompt is one step: the answer's token is drawn among yes and no alone, and the log-probabilities
that come with it name the other one too where it is among the likeliest. Where it is not, a second request
draws it alone; its prompt is in the prefix cache by then.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from starlette.types import Receive

from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import SamplingParams
from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.flow import collect, followed
from pegainfer.frontend.http.answer.generation import Generation, Prompt
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.fields import GenerateFields, count
from pegainfer.frontend.http.request.jobs import (
    Common,
    build_prompt,
    check_length,
    common,
    prompt_ids,
    too_long,
)
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.routes.embeddings import pooled, vector
from pegainfer.frontend.yes_no import MOST_LOGPROBS, cosine, probability

Pairs = list[tuple[str, str]]


class Scored(msgspec.Struct, frozen=True):
    """The scores of a request, in the pairs' order."""

    id: str
    model: str
    scores: list[float]
    prompt_tokens: int


class ScoreFields(Protocol):
    """What the requests for scores share."""

    model: str | None
    instruction: str | None
    truncate_prompt_tokens: int | None
    user: str | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None
    timeout: float | None


class _Collected:
    """Implements flow.Body: keeps each choice's first log-probabilities."""

    def __init__(self) -> None:
        self.logprobs: dict[int, TokenLogprob] = {}

    def take(self, delta: Delta) -> None:
        if delta.finish == "abort":
            raise ApiError(503, "the request was aborted", code="aborted")
        for entry in delta.entries:
            self.logprobs.setdefault(delta.choice, entry.logprob)

    def body(self) -> None:
        return None


async def score_pairs(
    front: Front,
    r: ScoreFields,
    pairs: Pairs,
    size: int,
    arrival: float,
    receive: Receive,
    names: tuple[str, str],
) -> Scored:
    """Scores the pairs as the model does it.

    Args:
        size: of the request's body, in bytes.
        names: the request's fields of the first and the second texts, for errors.

    Raises ApiError, UnsupportedError, ClientGoneError, and what the engine refuses with.
    """
    method = front.own_pooling.choose_score(front.config.score_method)
    plain = _plain(r)
    shared = common(plain, front, arrival)
    if r.instruction is not None and method == "cosine":
        raise bad_value("instruction", "none: this model compares embeddings", "a text")
    run = _Run(front, plain, shared, arrival, receive)
    if method == "cosine":
        return await _by_angle(run, pairs, size, names)
    return await _by_answer(run, pairs, size, r.instruction, names[1])


def _plain(r: ScoreFields) -> GenerateFields:
    """The fields that it shares with other routes, as these have them."""
    names = ("model", "truncate_prompt_tokens", "user", "priority", "cache_salt", "request_id", "timeout")
    return GenerateFields(**{name: getattr(r, name) for name in names})


class _Run(msgspec.Struct, frozen=True):
    """One request on its way through the engine."""

    front: Front
    plain: GenerateFields
    shared: Common
    arrival: float
    receive: Receive

    def prompt(self, ids: list[int], params: SamplingParams, number: int) -> Prompt:
        return build_prompt(self.front, self.plain, self.shared, params, ids, number=number)

    async def finish(self, prompts: list[Prompt]) -> tuple[Generation, dict[int, TokenLogprob]]:
        """All prompts' ends, with the log-probabilities of each one's token where these were asked for."""
        generation = self.front.generation(self.shared.id, prompts, self.arrival)
        answer = _Collected()
        async with followed(self.front, generation, self.receive):
            await collect(generation, answer)
        return generation, answer.logprobs

    def scored(self, generation: Generation, scores: list[float]) -> Scored:
        model = self.front.answered_name(generation.adapter)
        return Scored(self.shared.id, model, scores, generation.prompt_tokens)


async def _by_answer(run: _Run, pairs: Pairs, size: int, instruction: str | None, name: str) -> Scored:
    front = run.front
    labels = front.yes_no.labels
    top = min(MOST_LOGPROBS, front.engine.info.max_logprobs)

    def prompts() -> list[Prompt]:
        out = []
        for number, (query, document) in enumerate(pairs):
            text = front.yes_no.text(query, document, instruction)
            param = name if len(pairs) == 1 else f"{name}[{number}]"
            out.append(run.prompt(_judged_ids(run, text, param), _drawn(labels, top), number))
        return out

    generation, found = await run.finish(await front.text_work(size, prompts))
    values = [dict([(f.token, f.logprob), *f.top]) for f in (found[i] for i in range(len(pairs)))]
    missing = [(i, label) for i, known in enumerate(values) for label in labels if label not in known]
    if missing:
        again = [
            run.prompt(generation.prompts[i].ids, _drawn((label,), 0), number)
            for number, (i, label) in enumerate(missing)
        ]
        _, found = await run.finish(again)
        for number, (i, label) in enumerate(missing):
            values[i][label] = found[number].logprob
    return run.scored(generation, [probability(known[labels[0]], known[labels[1]]) for known in values])


def _drawn(allowed: tuple[int, ...], top: int) -> SamplingParams:
    """One token among those allowed."""
    return SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=top, allowed_token_ids=allowed
    )


def _judged_ids(run: _Run, text: str, param: str) -> list[int]:
    """A prompt's ids; a pair that is to be cut loses its end. Raises ApiError (400) where it is too long."""
    front, keep = run.front, run.plain.truncate_prompt_tokens
    yes_no, most = front.yes_no, front.engine.info.max_model_len - 1
    around = len(yes_no.before) + len(yes_no.after)
    if keep is not None and keep != -1:
        count("truncate_prompt_tokens", keep, 0, around + 1, most)
    check_length(text, front, param, most - around, cut=keep is not None)
    ids = yes_no.encode(text)
    if keep is not None:
        ids = ids[: (most if keep == -1 else keep) - around]
    if len(ids) + around > most:
        raise too_long(param, front, most, len(ids) + around, str(len(ids) + around))
    return yes_no.prompt(ids)


async def _by_angle(run: _Run, pairs: Pairs, size: int, names: tuple[str, str]) -> Scored:
    front = run.front
    params = pooled(front, None)
    places: dict[str, int] = {}  # each text once: a query is compared with many documents

    def prompts() -> list[Prompt]:
        out: list[Prompt] = []
        for side, name in enumerate(names):
            for text in (pair[side] for pair in pairs):
                if text not in places:
                    places[text] = len(out)
                    ids = prompt_ids(text, run.plain, front, name)
                    out.append(run.prompt(ids, params, len(out)))
        return out

    generation, _ = await run.finish(await front.text_work(size, prompts))

    def compare() -> list[float]:
        vectors = [vector(prompt, normalize=False).tolist() for prompt in generation.prompts]
        return [cosine(vectors[places[a]], vectors[places[b]]) for a, b in pairs]

    return run.scored(generation, await front.text_work(generation.bulk, compare, "detokenize"))
