"""How an answer is shaped, checked alike for every route: streams, lengths, logprobs."""

from __future__ import annotations

import msgspec

from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.fields import GenerateFields, StreamOptions, count
from pegainfer.frontend.http.request.limits import bad_value


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """
    max_tokens: as the request has it; None takes the route's default.
    logprobs: alternatives a token; None: no logprobs.
    token_ids: the answer carries ids beside its text.
    prompt_logprobs: alternatives a token of the prompt; None: no logprobs of it.
    echo: the prompt stands before the text.
    """

    max_tokens: int | None = None
    logprobs: int | None = None
    token_ids: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False

    @property
    def engine_prompt_logprobs(self) -> int | None:
        """What the engine is asked for: an echo shows the prompt's logprobs beside the answer's."""
        wanted = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return max(wanted) if wanted else None


def stream_options(request: GenerateFields) -> StreamOptions | None:
    """None for an answer in one piece, which options of a stream do not change."""
    return (request.stream_options or StreamOptions()) if request.stream else None


def most_logprobs(front: Front) -> int:
    """How many alternatives a token may be asked for."""
    return min(front.config.max_logprobs, front.engine.info.max_logprobs)


def answer_options(
    request: GenerateFields,
    front: Front,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
) -> AnswerOptions:
    """Raises ApiError (400).

    Args:
        max_tokens, logprobs: from the fields by which the route calls them, checked.
    """
    top = request.prompt_logprobs
    if top is not None:
        count("prompt_logprobs", top, 0, 0, most_logprobs(front))
        if request.stream:
            raise bad_value("prompt_logprobs", "stream: false beside it", "a stream")
    return AnswerOptions(
        max_tokens=max_tokens,
        logprobs=logprobs,
        token_ids=bool(request.return_token_ids),
        prompt_logprobs=top,
        echo=echo,
    )
