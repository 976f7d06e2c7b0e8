"""How a generation's deltas reach the client: as one JSON body or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send

from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.generation import Generation
from pegainfer.frontend.http.answer.responses import (
    DONE,
    KEEP_ALIVE,
    EventStream,
    Headers,
    encode,
    send_bytes,
    sse,
)
from pegainfer.frontend.http.errors import ApiError, to_api_error
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.observation.observed import note, note_error
from pegainfer.frontend.http.request.body import ClientGoneError
from pegainfer.frontend.http.request.fields import StreamOptions


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(generation: Generation) -> Usage:
    """The sums so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(generation.cached_tokens))


class Body(Protocol):
    """An answer in one piece."""

    def take(self, delta: Delta) -> None:
        """What came of one choice."""

    def body(self) -> Any:
        """The whole answer, once every choice has finished."""


class Stream(Protocol):
    """An answer as events. All of its bytes are whole events."""

    def feed(self, delta: Delta) -> bytes:
        """The events of one delta; nothing where there is nothing to show yet."""

    def end(self) -> bytes:
        """The last events, once every choice has finished."""

    def failed(self, error: ApiError) -> bytes:
        """The last events where an error ends the stream."""

    def keep_alive(self) -> bytes:
        """What is sent when nothing has come for long."""


async def collect(generation: Generation, answer: Body) -> None:
    """Follows a started generation to its end. Raises ApiError for what failed, ClientGoneError."""
    while not generation.done:
        for delta in await generation.next():
            if delta.error is not None:
                raise delta.error
            answer.take(delta)


async def send_body(
    front: Front,
    generation: Generation,
    answer: Body,
    receive: Receive,
    send: Send,
    headers: Headers = (),
) -> None:
    """Runs a generation to its end and sends one JSON body.

    Raises:
        PegaError, ApiError: nothing was sent.
        ClientGoneError: the client hung up; the engine has been told.
    """
    async with followed(front, generation, receive):
        await collect(generation, answer)
        # Thousands of logprobs or of a vector's numbers would hold up everybody else's answers.
        body = await front.text_work(generation.bulk, lambda: encode(answer.body()), "detokenize")
        await send_bytes(send, body, headers=[*_id_header(generation), *headers])


async def send_stream(
    front: Front,
    generation: Generation,
    answer: Stream,
    receive: Receive,
    send: Send,
    headers: Headers = (),
) -> None:
    """Runs a generation to its end and sends its events.

    Raises:
        PegaError, ApiError: before anything was sent; later ones are told in the stream.
        ClientGoneError: the client hung up; the engine has been told.
    """
    async with followed(front, generation, receive):
        out = EventStream(send, [*_id_header(generation), *headers], front.config.write_seconds)
        try:
            await _send_events(generation, answer, out)
        except ClientGoneError:
            raise
        except Exception as e:
            if not out.started:
                raise
            error = to_api_error(e)
            note_error(error.message, 200)
            await out.end(answer.failed(error))


def _id_header(generation: Generation) -> Headers:
    return [(b"x-request-id", generation.id.encode())]


@contextlib.asynccontextmanager
async def followed(front: Front, generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Submits the generation, and has it cancelled if the client hangs up before the context ends."""
    note(generation)
    generation.start()
    front.keep_alive.arm()
    watch = asyncio.ensure_future(_watch(receive, generation))
    try:
        yield
    finally:
        generation.close()
        watch.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    """The body has been read, so the next thing a client can say is that it left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_gone()


async def _send_events(generation: Generation, answer: Stream, out: EventStream) -> None:
    while not generation.done:
        deltas = await generation.next()
        data = bytearray() if deltas else bytearray(answer.keep_alive())
        for delta in deltas:
            if delta.error is not None and (not out.started or _for_all(generation, delta.error)):
                raise delta.error
            if delta.error is not None:  # one choice of several
                note_error(delta.error.message, 200)
            data += answer.feed(delta)
        if generation.done:
            await out.end(bytes(data) + answer.end())
        elif data:
            await out.write(bytes(data))


def _for_all(generation: Generation, error: ApiError) -> bool:
    """Whether an error ends the stream; one of several choices ends alone, by its finish_reason."""
    return error.code == "engine_dead" or generation.num_choices == 1


async def send_chunked(
    front: Front,
    generation: Generation,
    shape: Chunked,
    options: StreamOptions | None,
    receive: Receive,
    send: Send,
) -> None:
    """Answers as completions and chat do; `options` None: in one piece. Raises what the senders raise."""
    if options is None:
        body = Collected(generation.num_choices, shape.whole)
        await send_body(front, generation, body, receive, send)
    else:
        await send_stream(front, generation, ChunkStream(shape, options), receive, send)


class Collected:
    """A Body that is made of each choice's sum of deltas, in order."""

    def __init__(self, num_choices: int, make: Callable[[list[Delta]], Any]) -> None:
        self._sums = [Delta(i) for i in range(num_choices)]
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._make = make

    def take(self, delta: Delta) -> None:
        total = self._sums[delta.choice]
        self._texts[delta.choice].append(delta.text)
        total.tokens += delta.tokens
        total.entries += delta.entries
        total.finish, total.stop_reason = delta.finish, delta.stop_reason

    def body(self) -> Any:
        for total, texts in zip(self._sums, self._texts, strict=True):
            total.text = "".join(texts)
        return self._make(self._sums)


class Chunked(Protocol):
    """The answers of completions and chat, whole and in chunks."""

    def whole(self, deltas: list[Delta]) -> Any:
        """The answer in one piece, from each choice's sum."""

    def chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> Any | None:
        """One streamed event, None where there is nothing to show yet."""

    def last_chunk(self, usage: Usage) -> Any:
        """The event with usage and no choices."""

    def usage(self) -> Usage: ...


class ChunkStream:
    """A Stream as OpenAI's completions and chat have it."""

    def __init__(self, shape: Chunked, options: StreamOptions) -> None:
        self._shape = shape
        self._options = options

    def feed(self, delta: Delta) -> bytes:
        chunk = self._shape.chunk(delta, self._usage())
        return b"" if chunk is None else sse(chunk)

    def end(self) -> bytes:
        last = sse(self._shape.last_chunk(self._shape.usage())) if self._options.include_usage else b""
        return last + DONE

    def failed(self, error: ApiError) -> bytes:
        return sse(error.body) + DONE

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def _usage(self) -> Usage | msgspec.UnsetType | None:
        if self._options.continuous_usage_stats:
            return self._shape.usage()
        return None if self._options.include_usage else msgspec.UNSET
