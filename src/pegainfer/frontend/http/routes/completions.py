"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.contract.request import SamplingParams
from pegainfer.frontend.detokenize import Detokenizer
from pegainfer.frontend.http.answer import logprobs as lp
from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.flow import Usage, send_chunked, usage_of
from pegainfer.frontend.http.answer.generation import Echo, Generation, Prompt
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.fields import GenerateFields, count, token_limit
from pegainfer.frontend.http.request.grammars import requested_grammar
from pegainfer.frontend.http.request.jobs import (
    Common,
    build_prompt,
    common,
    prompt_ids,
    prompt_sources,
    sampling,
)
from pegainfer.frontend.http.request.limits import at_most, bad_value
from pegainfer.frontend.http.request.neutral import refuse_unserved
from pegainfer.frontend.http.request.options import (
    AnswerOptions,
    answer_options,
    most_logprobs,
    stream_options,
)
from pegainfer.frontend.http.request.sampling_defaults import SamplingDefaults


class CompletionRequest(GenerateFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: lp.CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, lp.PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Both the whole answer and a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


async def completions(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Checks, tokenises, submits and answers. Raises what the checks and `send_body` raise."""
    arrival = time.monotonic()
    request, size = await read_request(scope, receive, CompletionRequest, front.config)
    front.check_model(request.model)
    refuse_unserved(request)
    stream = stream_options(request)
    options = _options(request, front)
    shared = common(request, front, arrival)
    grammar = await requested_grammar(front, request)
    if grammar is not None:
        shared = msgspec.structs.replace(shared, grammar=grammar)
    # Token ids cost a tenth of what text does: up to some 4,000 of them are not worth another thread.
    work = size // 8 if _holds_ids(request.prompt) else size
    prompts = await front.text_work(work, lambda: _prompts(front, request, shared, options))
    generation = front.generation(shared.id, prompts, arrival)
    shape = CompletionAnswer(front, generation, options)
    await send_chunked(front, generation, shape, stream, receive, send)


def _holds_ids(prompt: str | list[str | int | list[int]]) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _options(r: CompletionRequest, front: Front) -> AnswerOptions:
    echo = bool(r.echo)
    max_tokens = token_limit("max_tokens", r.max_tokens, 0)
    if max_tokens == 0 and not echo:
        raise bad_value("max_tokens", "at least 1, or 0 with echo: true", 0)
    if r.logprobs is not None:
        count("logprobs", r.logprobs, 0, 0, most_logprobs(front))
    return answer_options(r, front, max_tokens=max_tokens, logprobs=r.logprobs, echo=echo)


def _prompts(front: Front, r: CompletionRequest, shared: Common, options: AnswerOptions) -> list[Prompt]:
    params = sampling(front, r, options, _defaults(front, r))
    sources = prompt_sources(r.prompt, "prompt", front)
    most = max(front.config.max_prompts, front.config.max_n)
    at_most("n", len(sources) * shared.n, most, "continuations in one request")
    return [_prompt(front, r, shared, params, source, i, len(sources)) for i, source in enumerate(sources)]


def _defaults(front: Front, r: CompletionRequest) -> SamplingDefaults:
    return front.completion_defaults if r.temperature is None else front.drawn_completion_defaults


def _prompt(
    front: Front,
    r: CompletionRequest,
    shared: Common,
    params: SamplingParams,
    source: str | list[int],
    number: int,
    of: int,
) -> Prompt:
    param = "prompt" if of == 1 else f"prompt[{number}]"
    special, answered = r.add_special_tokens is not False, params.max_tokens != 0
    ids = prompt_ids(source, r, front, param, special=special, answered=answered)
    prompt = build_prompt(front, r, shared, params, ids, number=number)
    if r.echo:
        whole = source if isinstance(source, str) and r.truncate_prompt_tokens is None else None
        prompt.echo = _echo(front, ids, whole, skip_special=r.skip_special_tokens is not False)
    return prompt


def _echo(front: Front, ids: list[int], source: str | None, *, skip_special: bool) -> Echo:
    """The prompt's text, and where each token's begins in it.

    Args:
        source: the text as the request has it. It may spell special tokens, and others were put around it.
        skip_special: leaves special tokens out where there is no such text.
    """
    tokenizer, special = front.tokenizer, front.tokenizer.special_ids
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, after_text=False)
    parts, starts, at = [], [], 0
    for token in ids:
        starts.append(at)
        if token in special:
            name = tokenizer.token_bytes(token).decode("utf-8", "replace")
            if skip_special if source is None else not source.startswith(name, at):
                continue
        parts.append(detokenizer.push(token))
        at += len(parts[-1])
    # What decoding gives may differ from the source where the tokenizer normalises.
    return Echo("".join(parts) if source is None else source, starts)


class CompletionAnswer:
    """Implements flow.Chunked."""

    def __init__(self, front: Front, generation: Generation, options: AnswerOptions) -> None:
        self._tokenizer = front.tokenizer
        self._generation = generation
        self._options = options
        self._id = "cmpl-" + generation.id
        self._created = int(time.time())
        self._model = front.answered_name(generation.adapter)
        self._n = generation.num_choices // len(generation.prompts)
        self._begun: set[int] = set()  # choices of which a chunk was made

    def whole(self, deltas: list[Delta]) -> Completion:
        """The body of an answer that is not streamed, from one delta a choice, in order."""
        return self._completion([self._choice(delta, first=True) for delta in deltas], self.usage())

    def chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> Completion | None:
        if delta.empty and not (self._options.token_ids and delta.tokens):
            return None
        first = delta.choice not in self._begun
        self._begun.add(delta.choice)
        return self._completion([self._choice(delta, first=first)], usage)

    def last_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def usage(self) -> Usage:
        return usage_of(self._generation)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)

    def _choice(self, delta: Delta, *, first: bool) -> CompletionChoice:
        """A choice of an answer or a chunk; the `first` of an index carries what belongs to its prompt."""
        options = self._options
        prompt = self._generation.prompts[delta.choice // self._n]
        choice = CompletionChoice(index=delta.choice, text=delta.text, finish_reason=delta.finish)
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        if options.logprobs is not None:
            choice.logprobs = self._logprobs(prompt, delta, first=first)
        if prompt.echo is not None and first:
            choice.text = prompt.echo.text + choice.text
        if options.token_ids:
            choice.token_ids = delta.tokens
            if first:
                choice.prompt_token_ids = prompt.ids
        if options.prompt_logprobs is not None and first:
            given = prompt.prompt_logprobs or ()
            choice.prompt_logprobs = lp.prompt_logprobs(self._tokenizer, given, options.prompt_logprobs)
        return choice

    def _logprobs(self, prompt: Prompt, delta: Delta, *, first: bool) -> lp.CompletionLogprobs:
        top = self._options.logprobs or 0
        echo = prompt.echo
        offset = 0 if echo is None else len(echo.text)
        own = lp.completion_logprobs(self._tokenizer, delta.entries, top=top, offset=offset)
        if echo is None or not first:
            return own
        given = prompt.prompt_logprobs or (None,) * len(prompt.ids)
        return lp.join(lp.echo_logprobs(self._tokenizer, prompt.ids, given, echo.starts, top=top), own)
