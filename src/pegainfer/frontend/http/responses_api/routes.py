"""The routes themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.flow import collect, send_body, send_stream
from pegainfer.frontend.http.answer.responses import send_json
from pegainfer.frontend.http.connection.auth import key_digest
from pegainfer.frontend.http.errors import ApiError, renaming, to_api_error
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.body import read_request
from pegainfer.frontend.http.request.conversation import Conversation, prepare, prompt_text
from pegainfer.frontend.http.request.limits import bad_value, in_range
from pegainfer.frontend.http.request.options import AnswerOptions
from pegainfer.frontend.http.request.tools import tool_plan
from pegainfer.frontend.http.responses_api.answer import ResponseAnswer
from pegainfer.frontend.http.responses_api.begin import begun
from pegainfer.frontend.http.responses_api.items import normalised
from pegainfer.frontend.http.responses_api.request import (
    ENCRYPTED,
    INCLUDES,
    NAMES,
    ResponsesRequest,
    check,
    options,
    to_chat,
)
from pegainfer.frontend.http.responses_api.store import Stored
from pegainfer.frontend.http.responses_api.tools import explaining_tools, namespaces
from pegainfer.frontend.json_object import JsonObject

log = logging.getLogger(__name__)

MAX_LISTED = 100
DEFAULT_LISTED = 20


class ItemList(msgspec.Struct):
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


async def create(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/responses. Raises what the checks and `send_body` raise."""
    arrival = time.monotonic()
    with explaining_tools():
        r, own_size = await read_request(scope, receive, ResponsesRequest, front.config)
    front.check_model(r.model)
    check(front, r)
    shape = options(front, r)
    owner = key_digest(scope)
    history, size = _history(front, r, owner)
    size += own_size
    if size > front.config.max_body_bytes:
        most = front.config.max_body_bytes
        raise bad_value("previous_response_id", f"≤ {most} bytes of conversation with this request", size)
    given = await front.text_work(own_size, lambda: normalised(r.input))
    with renaming(NAMES):
        ready = await _prepare(front, r, [*history, *given], shape, size, arrival)
    generation = ready.generation
    if r.client_metadata:
        log.debug("request %s has client_metadata %r", generation.id, r.client_metadata)
    response = begun(front, r, "resp_" + generation.id, generation.adapter)
    answer = ResponseAnswer(
        front,
        generation,
        ready.syntax,
        response,
        namespaces=namespaces(r.tools),
        logprobs=shape.logprobs is not None,
        encrypted=ENCRYPTED in r.includes,
    )
    entry = front.responses.put(response, history, given, owner, size) if response.store else None
    try:
        with renaming(NAMES):
            if entry is not None and r.background:
                await _start(front, entry, ready, answer, send)
            else:
                sender = send_stream if r.stream else send_body
                await sender(front, generation, answer, receive, send)
    except BaseException:
        if entry is not None and response.status == "in_progress":
            front.responses.drop(entry)  # nothing was answered, or nobody has read it to its end
        raise
    if entry is not None:
        front.responses.resize(entry)


async def input_tokens(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/responses/input_tokens: the prompt's length. Raises ApiError (400)."""
    with explaining_tools():
        r, own_size = await read_request(scope, receive, ResponsesRequest, front.config)
    front.check_model(r.model)
    check(front, r)
    history, size = _history(front, r, key_digest(scope))
    given = await front.text_work(own_size, lambda: normalised(r.input))
    with renaming(NAMES):
        chat = await front.text_work(own_size, lambda: to_chat(front, r, [*history, *given]))
        text = await prompt_text(front, chat, tool_plan(chat), size + own_size)
        front.check_counted("messages", text)
    # The template has written BOS itself.
    ids = await front.text_work(len(text), lambda: front.tokenizer.encode(text, add_special_tokens=False))
    await send_json(send, {"object": "response.input_tokens", "input_tokens": len(ids)})


def _history(front: Front, r: ResponsesRequest, owner: bytes | None) -> tuple[list[JsonObject], int]:
    """The items of the conversation that a request goes on with, and about how many bytes they are."""
    if r.previous_response_id is None:
        return [], 0
    before = front.responses.get(r.previous_response_id, owner, "previous_response_id")
    if before.response.status == "in_progress":
        raise bad_value("previous_response_id", "a response that has ended", "one in progress")
    return before.items, before.size


async def _prepare(
    front: Front,
    r: ResponsesRequest,
    items: Sequence[JsonObject],
    shape: AnswerOptions,
    size: int,
    arrival: float,
) -> Conversation:
    """With truncation 'auto', as few of the oldest turns are left out as make the rest fit.

    Args:
        size: of all items, in bytes.
    """

    async def attempt(some: Sequence[JsonObject]) -> Conversation:
        chat = await front.text_work(size, lambda: to_chat(front, r, some))
        return await prepare(front, chat, shape, size, arrival)

    try:
        return await attempt(items)
    except ApiError as error:
        if r.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        too_long = error
    head, starts = _turns(items)
    found: Conversation | None = None
    low, high = 1, len(starts) - 1  # the last turn always stays
    while low <= high:
        dropped = (low + high) // 2
        try:
            found = await attempt([*items[:head], *items[starts[dropped] :]])
            high = dropped - 1
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = dropped + 1
    if found is None:
        raise too_long
    return found


def _turns(items: Sequence[JsonObject]) -> tuple[int, list[int]]:
    """How many items systems say at the beginning, and where each turn of the user begins after that."""
    head = 0
    while head < len(items) and items[head].get("role") in ("system", "developer"):
        head += 1
    starts = [i for i in range(head, len(items)) if items[i].get("role") == "user"]
    return head, starts


async def _start(
    front: Front, entry: Stored, ready: Conversation, answer: ResponseAnswer, send: Send
) -> None:
    """Answers at once, while the response is made in the background."""
    generation = ready.generation
    generation.start()
    front.keep_alive.arm()
    entry.generation = generation
    front.responses.spawn(_run(front, entry, answer))
    await send_json(send, entry.response, headers=[(b"x-request-id", generation.id.encode())])


async def _run(front: Front, entry: Stored, answer: ResponseAnswer) -> None:
    generation = entry.generation
    assert generation is not None
    try:
        await collect(generation, answer)
        answer.body()
    except Exception as error:
        failure = to_api_error(error)
        log.warning("a background response has failed: %s", failure.message)
        answer.fail(failure)
    finally:
        generation.close()
        entry.generation = None
        front.responses.resize(entry)


async def retrieve(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /v1/responses/{id}. Raises ApiError (400, 404)."""
    query = _query(scope, ("include", "stream"))
    if query.get("stream", "false") != "false":
        raise bad_value("stream", "false: a stored response is not streamed again", query["stream"][:20])
    await send_json(send, _stored(front, scope).response)


async def delete(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """DELETE /v1/responses/{id}: forgotten; one in the background is ended. Raises ApiError (404)."""
    entry = _stored(front, scope)
    front.responses.drop(entry)
    await send_json(send, {"id": entry.response.id, "object": "response", "deleted": True})


async def cancel(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """POST /v1/responses/{id}/cancel: ends a response in the background; what there is of it stays.

    Raises ApiError (400, 404).
    """
    entry = _stored(front, scope)
    if not entry.response.background:
        raise ApiError(
            400, "response_id: expected a response in the background; others end with their stream"
        )
    if entry.generation is not None:
        entry.generation.abort()
        entry.response.status = "cancelled"  # for good: what was on its way meanwhile changes it no more
    if entry.response.status != "cancelled":
        raise ApiError(
            400, f"response_id: expected a response in progress, got one that is {entry.response.status}"
        )
    await send_json(send, entry.response)


async def input_items(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """GET /v1/responses/{id}/input_items: all that the model was given, the conversation before included.

    Raises ApiError (400, 404).
    """
    query = _query(scope, ("limit", "order", "after", "include"))
    limit = _limit(query.get("limit"))
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_value("order", "asc or desc", repr(order[:20]))
    entry = _stored(front, scope)
    items = [*entry.history, *entry.input]
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise bad_value("after", "the id of an item", repr(after[:80]))
        items = items[at + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    await send_json(send, ItemList(page, first, last, len(items) > limit))


def _stored(front: Front, scope: Scope) -> Stored:
    return front.responses.get(scope["path_params"]["id"], key_digest(scope))


def _query(scope: Scope, names: tuple[str, ...]) -> dict[str, str]:
    """The query's parameters. Raises ApiError (400) for an unknown one and for includes not served."""
    query: dict[str, Any] = {}
    for key, value in QueryParams(scope["query_string"]).multi_items():
        name = key.removesuffix("[]")
        if name not in names:
            raise ApiError(400, f"{name[:60]}: unknown parameter", param=name[:60])
        if name == "include" and value not in INCLUDES:
            raise bad_value("include", "any of " + ", ".join(INCLUDES), repr(value[:60]))
        query[name] = value
    return query


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LISTED
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise bad_value("limit", f"1 to {MAX_LISTED}", repr(text[:20]))
    in_range("limit", int(text), 1, MAX_LISTED)
    return int(text)
