"""One prompt on its way through the engine: events in, text and finish reasons out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pegainfer.app.outputs import CompletionOutput, Logprob, RequestOutput, candidates
from pegainfer.app.prompts import Prompt, truncated
from pegainfer.app.sampling_params import SamplingParams
from pegainfer.app.structured import GrammarMaker
from pegainfer.contract.errors import RequestError
from pegainfer.contract.event import FinishReason, Timings, TokenEvent, TokenLogprob, error_of
from pegainfer.contract.request import GenerateRequest, GrammarSpec, pack_tokens
from pegainfer.frontend.detokenize import Detokenizer, StopStrings
from pegainfer.frontend.http.answer.choice import Choice
from pegainfer.frontend.tokenizer import Tokenizer


class _NoText(Detokenizer):
    """For continuations of which only the ids are wanted."""

    def push(self, token: int) -> str:
        return ""


class Continuation:
    """One of a request's n continuations, read as the server reads its own. Mutated by `feed`."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        """Raises RequestError for stop strings that cannot be looked for."""
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        stops: dict[int, int | str] = {token: token for token in params.stop_token_ids or ()}
        stops |= tokenizer.special_stops(params.stop_strings)
        self._choice = Choice(
            index,
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else _NoText(tokenizer),
            StopStrings(params.stop_strings),
            min_tokens=params.min_tokens,
            user_stops=stops,
            show_stop=params.include_stop_str_in_output,
        )
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._stop_reason: int | str | None = None
        self._told = (0, 0, False)  # tokens and pieces of text in outputs before, and whether the finish was

    @property
    def finish(self) -> str | None:
        """Why it has ended; None before."""
        return self._choice.finish

    def feed(self, event: TokenEvent) -> None:
        """Takes the tokens of an event, up to a stop string, and its finish."""
        delta = self._choice.feed(event)
        self.tokens += delta.tokens
        # All of them: those of a stop string that is cut away have no text, but are among the tokens.
        self._logprobs += (event.logprobs or ())[: len(delta.tokens)]
        self._text.append(delta.text)
        self._stop_reason = delta.stop_reason

    @property
    def has_news(self) -> bool:
        """Whether an output would hold what no output before held."""
        return self._told != (len(self.tokens), len(self._text), self.finish is not None)

    def output(self, *, delta: bool = False) -> CompletionOutput:
        """What there is so far, or with `delta` what no output before held. Mutates what counts as told."""
        asked = self._params.logprobs is not None
        tokens, pieces, _ = self._told if delta else (0, 0, False)
        self._told = (len(self.tokens), len(self._text), self.finish is not None)
        logprobs = [candidates(e, self._tokenizer) for e in self._logprobs[tokens:]] if asked else None
        return CompletionOutput(
            index=self._index,
            text="".join(self._text[pieces:]),
            token_ids=self.tokens[tokens:],
            cumulative_logprob=sum(e.logprob for e in self._logprobs) if asked else None,
            logprobs=logprobs,
            finish_reason=self.finish,
            stop_reason=self._stop_reason,
        )


class Request:
    """A prompt and its continuations. Mutated by `take`."""

    def __init__(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        tokenizer: Tokenizer,
        adapter: str | None = None,
        grammar: GrammarSpec | None = None,
    ) -> None:
        """Raises RequestError where the parameters cannot be encoded."""
        if not isinstance(params, SamplingParams):
            raise RequestError("bad sampling_params", expected="SamplingParams", got=type(params).__name__)
        if params.n < 1:  # the engine's answer comes index by index, so there would be none
            raise RequestError("n is out of range", expected="≥ 1", got=params.n, param="n")
        self.id = request_id
        self._prompt = prompt
        self._params = params
        self._priority = priority
        self._adapter = adapter
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._engine_params = params.to_engine(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            special_stops=tokenizer.special_stops(params.stop_strings),
        )
        self._continuations = [Continuation(i, params, tokenizer) for i in range(params.n)]
        self._running = set(range(params.n))  # those that the engine has not finished
        self._prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._cached = 0
        self._timings: Timings | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(c.tokens) for c in self._continuations)

    def to_engine(self) -> GenerateRequest:
        """What the engine is asked; stop strings stay here."""
        return GenerateRequest(
            id=self.id,
            prompt=pack_tokens(self._prompt.ids),
            sampling=self._engine_params,
            n=self._params.n,
            eos_token_ids=self._tokenizer.eos_token_ids,
            grammar=self._grammar,
            adapter=self._adapter,
            priority=self._priority,
        )

    def take(self, event: TokenEvent) -> tuple[bool, bool]:
        """Takes an event; (all continuations have ended, and the engine must be told to stop).

        Raises what an ERROR event stands for.
        """
        if event.finish is FinishReason.ERROR:
            raise error_of(event)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        self._cached = max(self._cached, event.num_cached_tokens)
        self._timings = event.timings or self._timings
        if event.finish is not None:
            self._running.discard(event.index)
        continuation = self._continuations[event.index]
        if continuation.finish is None:
            continuation.feed(event)
        done = all(c.finish is not None for c in self._continuations)
        return done, done and bool(self._running)

    def output(self, *, delta: bool = False) -> RequestOutput:
        """The answer so far; with `delta` only what no output before held, of continuations that went on."""
        told = [c for c in self._continuations if c.has_news or not delta]
        return RequestOutput(
            request_id=self.id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.ids,
            prompt_logprobs=self._candidates(),
            outputs=[c.output(delta=delta) for c in told],
            finished=all(c.finish is not None for c in self._continuations),
            num_cached_tokens=self._cached,
            metrics=self._timings,
        )

    def _candidates(self) -> list[dict[int, Logprob] | None] | None:
        if self._params.prompt_logprobs is None:
            return None
        entries = self._prompt_logprobs or (None,) * self.prompt_tokens
        return [None if e is None else candidates(e, self._tokenizer) for e in entries]


def make_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    priority: int,
    tokenizer: Tokenizer,
    grammars: GrammarMaker,
    longest: int,
    adapter: str | None = None,
) -> Request:
    """A request with its prompt truncated and its grammar compiled, as the parameters say.

    Args:
        longest: tokens of a prompt that the context holds with one after it.

    Raises RequestError for a faulty parameter.
    """
    grammar = None
    if isinstance(params, SamplingParams):  # Request refuses anything else
        params = replace(params)  # checked again, and the caller may change its own meanwhile
        prompt = truncated(prompt, params.truncate_prompt_tokens, longest)
        wanted = params.structured_outputs
        grammar = None if wanted is None else grammars.make(wanted)
    return Request(request_id, prompt, params, priority, tokenizer, adapter, grammar)


class Running(Protocol):
    """What is asked of the engine for one prompt, and takes its events. Mutated by `take`."""

    id: str

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def to_engine(self) -> GenerateRequest: ...

    def take(self, event: TokenEvent) -> tuple[bool, bool]:
        """(all continuations have ended, and the engine must be told to stop)."""
