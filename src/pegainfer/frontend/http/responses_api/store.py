"""Responses that were asked to be kept: in memory, bounded by number, size and age."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.http.answer.generation import Generation
from pegainfer.frontend.http.answer.responses import encode
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.responses_api.response import Response
from pegainfer.frontend.json_object import JsonObject


class Stored(msgspec.Struct, eq=False):
    """A response and the conversation that led to it.

    before: bytes of the history and the input, about as they came; what responses share is counted for each.
    """

    response: Response
    history: list[JsonObject]  # normalised items of all responses before it
    input: list[JsonObject]  # its own
    owner: bytes | None  # who may see it: the digest of the key it was made with
    before: int
    until: float  # seconds on the store's clock
    size: int = 0  # bytes of all this
    generation: Generation | None = None  # of one in the background, while it runs

    @property
    def items(self) -> list[JsonObject]:
        """The conversation up to and with the answer."""
        return [*self.history, *self.input, *self.response.output]


class _Shelf(msgspec.Struct):
    """What one key has: its entries, used last goes last, and their bytes."""

    entries: OrderedDict[str, Stored] = msgspec.field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """put ──► get, used last goes last ──► dropped: too old, or one too many, or deleted.

    Where there is too much, the key that has the most loses what it used longest ago: none can push out what
    others keep.
    """

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
        self._shelves: dict[bytes | None, _Shelf] = {}
        self._by_age: OrderedDict[Stored, None] = OrderedDict()  # all of them
        self._bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references

    def __len__(self) -> int:
        return len(self._by_age)

    def put(
        self,
        response: Response,
        history: list[JsonObject],
        given: list[JsonObject],
        owner: bytes | None,
        size: int,
    ) -> Stored:
        """Keeps a response that begins.

        Args:
            size: of history and input, in bytes.

        Raises RequestError where this key has one with its id.
        """
        self._expire()
        shelf = self._shelves.setdefault(owner, _Shelf())
        if response.id in shelf.entries:
            raise RequestError(
                "a response with this id is stored", param="request_id", got=response.id.removeprefix("resp_")
            )
        entry = Stored(response, history, given, owner, size, self._clock() + self._seconds)
        shelf.entries[response.id] = entry
        self._by_age[entry] = None
        self.resize(entry)
        return entry

    def resize(self, entry: Stored) -> None:
        """Takes an entry's size anew, and drops what is too much now."""
        if entry not in self._by_age:
            return
        size = entry.before + len(encode(entry.response.output))
        self._shelves[entry.owner].num_bytes += size - entry.size
        self._bytes += size - entry.size
        entry.size = size
        while len(self) > self._most:
            self._drop_of(max(self._shelves.values(), key=lambda shelf: len(shelf.entries)))
        while self._bytes > self._most_bytes and len(self) > 1:
            self._drop_of(max(self._shelves.values(), key=lambda shelf: shelf.num_bytes))

    def _drop_of(self, shelf: _Shelf) -> None:
        self.drop(next(iter(shelf.entries.values())))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a response in the background."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def get(self, id: str, owner: bytes | None, param: str | None = None) -> Stored:
        """Raises ApiError (404) for one that is not there, or is another key's."""
        self._expire()
        shelf = self._shelves.get(owner, _Shelf())
        entry = shelf.entries.get(id)
        if entry is None:
            raise ApiError(
                404,
                f"{param or 'response_id'}: no response with the id {id[:200]!r} is stored",
                param=param,
                code="response_not_found",
            )
        shelf.entries.move_to_end(id)
        return entry

    def drop(self, entry: Stored) -> None:
        """Forgets a response; one that still runs is ended. Idempotent."""
        if entry not in self._by_age:
            return
        del self._by_age[entry]
        shelf = self._shelves[entry.owner]
        del shelf.entries[entry.response.id]
        shelf.num_bytes -= entry.size
        self._bytes -= entry.size
        if not shelf.entries:
            del self._shelves[entry.owner]
        if entry.generation is not None:
            entry.generation.abort()

    def _expire(self) -> None:
        """Drops what is too old, which nothing is that still runs."""
        now = self._clock()
        while self._by_age and (oldest := next(iter(self._by_age))).until <= now:
            if oldest.generation is None:
                self.drop(oldest)
            else:
                oldest.until = now + self._seconds
                self._by_age.move_to_end(oldest)
