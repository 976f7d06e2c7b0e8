"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer import logprobs as lp
from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.flow import Usage, send_chunked, usage_of
from pegainfer.frontend.http.answer.generation import Generation
from pegainfer.frontend.http.answer.reply import CallPart, Reply, ReplySyntax
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.conversation import ChatRequest, prepare
from pegainfer.frontend.http.request.fields import count, token_limit
from pegainfer.frontend.http.request.limits import bad_value
from pegainfer.frontend.http.request.neutral import refuse_unserved
from pegainfer.frontend.http.request.options import (
    AnswerOptions,
    answer_options,
    most_logprobs,
    stream_options,
)


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str  # JSON, of which a chunk has a piece


class Call(msgspec.Struct, kw_only=True):
    """A tool call. In a stream it has an `index`; `id`, `type` and the name are in its first chunk only."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None  # null where there are only calls
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """Of an answer (`message`) or of a chunk (`delta`)."""

    index: int
    message: ChatMessage | msgspec.UnsetType = msgspec.UNSET
    delta: ChatDelta | msgspec.UnsetType = msgspec.UNSET
    logprobs: lp.ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Both the whole answer and a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, lp.PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET


async def chat_completions(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Checks, renders, tokenises, submits and answers. Raises what the checks and `send_body` raise."""
    arrival = time.monotonic()
    request, size = await read_request(scope, receive, ChatRequest, front.config)
    front.check_model(request.model)
    refuse_unserved(request)
    stream = stream_options(request)
    options = _options(request, front)
    chat = await prepare(front, request, options, size, arrival)
    generation = chat.generation
    shape = ChatAnswer(front, generation, options, chat.syntax, streamed=stream is not None)
    await send_chunked(front, generation, shape, stream, receive, send)


def _options(r: ChatRequest, front: Front) -> AnswerOptions:
    limits = (
        token_limit("max_tokens", r.max_tokens),
        token_limit("max_completion_tokens", r.max_completion_tokens),
    )
    given = {k for k in limits if k is not None}
    if len(given) > 1:
        raise bad_value("max_tokens", f"max_completion_tokens' {r.max_completion_tokens}", r.max_tokens)
    if r.top_logprobs is not None:
        count("top_logprobs", r.top_logprobs, 0, 0, most_logprobs(front))
        if not r.logprobs and r.top_logprobs:
            raise bad_value("top_logprobs", "logprobs: true beside it", r.logprobs)
    logprobs = (r.top_logprobs or 0) if r.logprobs else None
    return answer_options(r, front, max_tokens=given.pop() if given else None, logprobs=logprobs)


class ChatAnswer:
    """Implements flow.Chunked."""

    def __init__(
        self,
        front: Front,
        generation: Generation,
        options: AnswerOptions,
        syntax: ReplySyntax,
        *,
        streamed: bool,
    ) -> None:
        self._tokenizer = front.tokenizer
        self._generation = generation
        self._options = options
        self._id = "chatcmpl-" + generation.id
        self._object = "chat.completion.chunk" if streamed else "chat.completion"
        self._created = int(time.time())
        self._model = front.answered_name(generation.adapter)
        self._replies = [Reply(syntax) for _ in range(generation.num_choices)]
        self._begun: set[int] = set()  # choices of which a chunk was made

    def whole(self, deltas: list[Delta]) -> ChatCompletion:
        """The body of an answer that is not streamed, from one delta a choice, in order."""
        choices = []
        for delta in deltas:
            reply = self._replies[delta.choice]
            parts = reply.push(delta.text, delta.finish)
            choice = self._choice(delta, reply)
            choice.message = message = ChatMessage(content=parts.content)
            if parts.reasoning:
                message.reasoning_content = parts.reasoning
            if parts.calls:
                message.content = parts.content or None
                message.tool_calls = [_call(call) for call in parts.calls]
            choices.append(choice)
        out = self._completion(choices, self.usage())
        prompt = self._generation.prompts[0]
        if self._options.token_ids:
            out.prompt_token_ids = prompt.ids
        top = self._options.prompt_logprobs
        if top is not None:
            out.prompt_logprobs = lp.prompt_logprobs(self._tokenizer, prompt.prompt_logprobs or (), top)
        return out

    def chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> ChatCompletion | None:
        reply = self._replies[delta.choice]
        parts = reply.push(delta.text, delta.finish)
        silent = not parts and not delta.entries and delta.finish is None
        if silent and not (self._options.token_ids and delta.tokens):
            return None
        choice = self._choice(delta, reply)
        choice.delta = ChatDelta()
        first = delta.choice not in self._begun
        if first:
            self._begun.add(delta.choice)
            choice.delta.role = "assistant"
        if parts.content or first:
            choice.delta.content = parts.content
        if parts.reasoning:
            choice.delta.reasoning_content = parts.reasoning
        if parts.calls:
            choice.delta.tool_calls = [_call(call, streamed=True) for call in parts.calls]
        out = self._completion([choice], usage)
        if self._options.token_ids and first:
            out.prompt_token_ids = self._generation.prompts[0].ids
        return out

    def last_chunk(self, usage: Usage) -> ChatCompletion:
        return self._completion([], usage)

    def usage(self) -> Usage:
        return usage_of(self._generation)

    def _completion(
        self, choices: list[ChatChoice], usage: Usage | msgspec.UnsetType | None
    ) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            object=self._object,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, delta: Delta, reply: Reply) -> ChatChoice:
        choice = ChatChoice(index=delta.choice, finish_reason=reply.finish(delta.finish))
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._options.logprobs is not None and (delta.entries or delta.finish is not None):
            choice.logprobs = lp.chat_logprobs(self._tokenizer, delta.entries)
        if self._options.token_ids:
            choice.token_ids = delta.tokens
        return choice


def _call(part: CallPart, *, streamed: bool = False) -> Call:
    call = Call(function=CalledFunction(arguments=part.arguments))
    if streamed:
        call.index = part.index
    if part.new is not None:
        call.id, call.type, call.function.name = part.new.id, "function", part.new.name
    return call
