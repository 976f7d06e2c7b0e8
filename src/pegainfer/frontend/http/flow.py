"""How a generation's deltas reach the client: as one JSON body or as a stream of events."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send

from pegainfer.frontend.http.body import ClientGoneError
from pegainfer.frontend.http.choice import Delta
from pegainfer.frontend.http.errors import ApiError, to_api_error
from pegainfer.frontend.http.fields import StreamOptions
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.generation import Generation
from pegainfer.frontend.http.responses import DONE, KEEP_ALIVE, EventStream, send_json, sse


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Answer(Protocol):
    """A route's shape of an answer."""

    def whole(self, deltas: list[Delta], usage: Usage) -> Any:
        """The body of an answer that is not streamed, from one delta a choice, in order."""

    def chunk(self, delta: Delta, usage: Usage | msgspec.UnsetType | None) -> Any | None:
        """One streamed event, None where there is nothing to show yet."""

    def last_chunk(self, usage: Usage) -> Any:
        """The event with usage and no choices."""

    def usage(self) -> Usage: ...


class _Collector:
    """Adds up each choice's deltas."""

    def __init__(self, num_choices: int) -> None:
        self._sums = [Delta(i) for i in range(num_choices)]
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]

    def add(self, delta: Delta) -> None:
        total = self._sums[delta.choice]
        self._texts[delta.choice].append(delta.text)
        total.tokens += delta.tokens
        total.entries += delta.entries
        total.finish, total.stop_reason = delta.finish, delta.stop_reason

    def done(self) -> list[Delta]:
        for total, texts in zip(self._sums, self._texts, strict=True):
            total.text = "".join(texts)
        return self._sums


def usage_of(generation: Generation) -> Usage:
    """The sums so far."""
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(generation.cached_tokens))


async def answer(
    front: Front,
    generation: Generation,
    shape: Answer,
    options: StreamOptions | None,
    receive: Receive,
    send: Send,
) -> None:
    """Runs a generation to its end.

    Args:
        options: of the stream; None: one JSON body.

    Raises:
        PegaError, ApiError: before anything was sent.
        ClientGoneError: the client hung up; the engine has been told.
    """
    generation.start()
    front.keep_alive.arm()
    watch = asyncio.ensure_future(_watch(receive, generation))
    headers = [(b"x-request-id", generation.id.encode())]
    try:
        if options is None:
            sums = _Collector(generation.num_choices)
            while not generation.done:
                for delta in await generation.next():
                    if delta.error is not None:
                        raise delta.error
                    sums.add(delta)
            await send_json(send, shape.whole(sums.done(), shape.usage()), headers=headers)
        else:
            await _stream(generation, shape, options, EventStream(send, headers, front.config.write_seconds))
    finally:
        generation.close()
        watch.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    """The body has been read, so the next thing a client can say is that it left."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.client_gone()


async def _stream(generation: Generation, shape: Answer, options: StreamOptions, out: EventStream) -> None:
    try:
        while not generation.done:
            deltas = await generation.next()
            data = bytearray() if deltas else bytearray(KEEP_ALIVE)
            for delta in deltas:
                if delta.error is not None and (not out.started or _for_all(generation, delta.error)):
                    raise delta.error
                chunk = shape.chunk(delta, _stream_usage(shape, options))
                if chunk is not None:
                    data += sse(chunk)
            if generation.done:
                if options.include_usage:
                    data += sse(shape.last_chunk(shape.usage()))
                await out.end(bytes(data) + DONE)
            elif data:
                await out.write(bytes(data))
    except ClientGoneError:
        raise
    except Exception as e:
        if not out.started:
            raise
        await out.end(sse(to_api_error(e).body) + DONE)


def _for_all(generation: Generation, error: ApiError) -> bool:
    """Whether an error ends the stream; one of several choices ends alone, by its finish_reason."""
    return error.code == "engine_dead" or generation.num_choices == 1


def _stream_usage(shape: Answer, options: StreamOptions) -> Usage | msgspec.UnsetType | None:
    if options.continuous_usage_stats:
        return shape.usage()
    return None if options.include_usage else msgspec.UNSET
