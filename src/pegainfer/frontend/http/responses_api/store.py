"""Responses that were asked to be kept: in memory, bounded by number, size and age."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.formats import JsonObject
from pegainfer.frontend.http.responses import encode

if TYPE_CHECKING:
    from pegainfer.frontend.http.generation import Generation
    from pegainfer.frontend.http.responses_api.response import Response


@dataclass(eq=False, slots=True)
class Stored:
    """A response and the conversation that led to it."""

    response: Response
    history: list[JsonObject]  # normalised items of all responses before it
    input: list[JsonObject]  # its own
    owner: bytes | None  # who may see it: the digest of the key it was made with
    size: int  # bytes of all this, as JSON; what responses share is counted for each of them
    until: float  # seconds on the store's clock
    generation: Generation | None = None  # of one in the background, while it runs

    @property
    def items(self) -> list[JsonObject]:
        """The conversation up to and with the answer."""
        return [*self.history, *self.input, *self.response.output]


class ResponseStore:
    """put ──► get, used last goes last ──► dropped: too old, or one too many, or deleted."""

    def __init__(
        self,
        *,
        most: int,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._entries: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        response: Response,
        history: list[JsonObject],
        given: list[JsonObject],
        owner: bytes | None,
    ) -> Stored:
        """Keeps a response that begins. Raises RequestError where its id is taken."""
        self._expire()
        if response.id in self._entries:
            raise RequestError(
                "a response with this id is stored", param="request_id", got=response.id.removeprefix("resp_")
            )
        entry = Stored(response, history, given, owner, 0, self._clock() + self._seconds)
        self._entries[response.id] = entry
        self.resize(entry)
        return entry

    def resize(self, entry: Stored) -> None:
        """Takes an entry's size anew, and drops what is too much now."""
        if self._entries.get(entry.response.id) is not entry:
            return
        size = len(encode(entry.items))
        self._bytes += size - entry.size
        entry.size = size
        while len(self._entries) > self._most or (self._bytes > self._most_bytes and len(self._entries) > 1):
            self.drop(next(iter(self._entries)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a response in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, id: str, owner: bytes | None, param: str | None = None) -> Stored:
        """Raises ApiError (404) for one that is not there, or is another key's."""
        self._expire()
        entry = self._entries.get(id)
        if entry is None or entry.owner != owner:
            raise ApiError(
                404,
                f"{param or 'response_id'}: no response with the id {id[:200]!r} is stored",
                param=param,
                code="response_not_found",
            )
        self._entries.move_to_end(id)
        return entry

    def drop(self, id: str) -> None:
        """Forgets a response; one that still runs is ended. Idempotent."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        self._bytes -= entry.size
        if entry.generation is not None:
            entry.generation.abort()

    def _expire(self) -> None:
        now = self._clock()
        for id in [id for id, entry in self._entries.items() if entry.until <= now]:
            self.drop(id)
