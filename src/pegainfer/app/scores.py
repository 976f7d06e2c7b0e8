"""Scores of the offline API: how well pairs of texts fit each other, as over HTTP (routes/scoring.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pegainfer.app.continuation import Running
from pegainfer.app.embedding import EmbeddingRequest
from pegainfer.app.prompts import Prompt, encode_prompt
from pegainfer.app.text import TextSide
from pegainfer.app.window import numbered
from pegainfer.contract.errors import PegaError, RequestError
from pegainfer.contract.event import FinishReason, TokenEvent, error_of
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.frontend.yes_no import YesNo, cosine, probability

Finish = Callable[[Sequence[Running]], None]
NewId = Callable[[], str]


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """One pair with its score.

    prompt_token_ids: what the model read: the question, or both texts one behind the other.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool
    num_cached_tokens: int


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of two sides, of which the first may be one text for all.

    Raises RequestError for what are no texts, and where the sides differ in number.
    """
    sides = []
    for name, given in (("text_1", first), ("text_2", second)):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(t, str) for t in texts):
            raise RequestError(f"bad {name}", expected="a text or a list of texts", got=f"{given!r:.80}")
        sides.append(list(texts))
    lefts, rights = sides
    if len(lefts) == 1:
        lefts = lefts * len(rights)
    if len(lefts) != len(rights):
        raise RequestError("text_1 and text_2 differ in number", expected=len(rights), got=len(lefts))
    return list(zip(lefts, rights, strict=True))


class LabelRequest:
    """A prompt whose next token is drawn among labels. Mutated by `take`."""

    num_tokens = 0  # nothing is generated for the user

    def __init__(self, request_id: str, ids: list[int], allowed: tuple[int, ...], top: int) -> None:
        self.id = request_id
        self.ids = ids
        self.cached = 0
        self.found: dict[int, float] = {}  # log-probabilities by token, of all that were told
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=top, allowed_token_ids=allowed
        )

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)

    def to_engine(self) -> GenerateRequest:
        return GenerateRequest(id=self.id, prompt=pack_tokens(self.ids), sampling=self._sampling)

    def take(self, event: TokenEvent) -> tuple[bool, bool]:
        """As Request.take. Raises what an ERROR event stands for, PegaError without log-probabilities."""
        if event.finish is FinishReason.ERROR:
            raise error_of(event)
        self.cached = max(self.cached, event.num_cached_tokens)
        for entry in event.logprobs or ():
            self.found |= dict([*entry.top, (entry.token, entry.logprob)])
        if event.finish is not None and not self.found:
            raise PegaError("the engine gave no log-probabilities")
        return event.finish is not None, False


def score_by_answer(
    finish: Finish, new_id: NewId, text: TextSide, top: int, pairs: Sequence[tuple[str, str]],
    instruction: str | None,
) -> list[ScoringRequestOutput]:  # fmt: skip
    """The probability of yes for each pair.

    Args:
        finish: runs requests to their ends.
        top: log-probabilities that the engine tells beside the drawn token's.

    Raises UnsupportedError where the model cannot be asked, and what the engine refuses or fails with.
    """
    yes_no = YesNo(text.tokenizer, text.template)
    requests = []
    for pair in pairs:
        ids = yes_no.prompt(yes_no.encode(yes_no.text(*pair, instruction)))
        requests.append(LabelRequest(new_id(), ids, yes_no.labels, top))
    finish(requests)
    missing = [(r, label) for r in requests for label in yes_no.labels if label not in r.found]
    again = [LabelRequest(new_id(), r.ids, (label,), 0) for r, label in missing]
    finish(again)
    for (request, label), told in zip(missing, again, strict=True):
        request.found[label] = told.found[label]
    yes, no = yes_no.labels
    return [
        ScoringRequestOutput(
            r.id, r.ids, ScoringOutput(probability(r.found[yes], r.found[no])), True, r.cached
        )
        for r in requests
    ]


def score_by_angle(
    finish: Finish, new_id: NewId, text: TextSide, pairs: Sequence[tuple[str, str]]
) -> list[ScoringRequestOutput]:
    """The cosine of the angle between the vectors of each pair. Raises as `score_by_answer`."""
    pooling = text.pooling.choose("auto")
    prompts: dict[str, Prompt] = {}
    for number, pair in enumerate(pairs):
        for each in pair:
            if each not in prompts:
                prompts[each] = numbered(number, encode_prompt, each, text.tokenizer)
    requests = {t: EmbeddingRequest(new_id(), p, pooling, normalize=False) for t, p in prompts.items()}
    finish(list(requests.values()))
    outputs = {t: r.output() for t, r in requests.items()}
    return [
        ScoringRequestOutput(
            outputs[a].request_id,
            prompts[a].ids + prompts[b].ids,
            ScoringOutput(cosine(outputs[a].outputs.embedding, outputs[b].outputs.embedding)),
            True,
            outputs[a].num_cached_tokens + outputs[b].num_cached_tokens,
        )
        for a, b in pairs
    ]
