"""What the offline API returns, with the fields that vLLM's users know."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.contract.event import Timings, TokenLogprob
from pegainfer.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One candidate at one position, under the raw logits' softmax."""

    logprob: float
    rank: int | None  # 1 is the most likely
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    Args:
        index: which of n.
        text: up to the stop string or stop token, which is cut off unless asked for.
        token_ids: the token that ended it included.
        cumulative_logprob: summed over token_ids; None unless logprobs were asked for.
        logprobs: for each token, candidates by id: the drawn one and the best.
        finish_reason: 'stop', 'length' or 'abort'; None where it goes on.
        stop_reason: the stop string or the id of stop_token_ids that ended it; None for EOS or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its continuations.

    Args:
        prompt: the text, None where token ids were given.
        prompt_logprobs: for each prompt token, None for the first; None unless asked for.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        metrics: CLOCK_MONOTONIC seconds at each door.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: Timings | None


def candidates(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The token at a position and the best ones, by id; the token itself comes first."""
    found = {
        entry.token: Logprob(
            entry.logprob, entry.rank, tokenizer.decode([entry.token], skip_special_tokens=False)
        )
    }
    for rank, (token, logprob) in enumerate(entry.top, start=1):
        if token != entry.token:
            found[token] = Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False))
    return found
