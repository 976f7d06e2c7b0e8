"""Records requests for the observers: console lines, access logs and traces.

request ─► Observed ─► handler ─► `note` says which generation answers it, `note_error` why it failed
               └─► answered or gone: the record, with the generation's sums, goes to each observer

Where all observers look at failures alone, as by default, nothing is measured and no record is made of a
request that succeeds: this runs for every request and every chunk of an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pegainfer.contract.observation import FailureObserver, Observer, RequestRecord
from pegainfer.frontend.http.request.body import header

if TYPE_CHECKING:
    from pegainfer.frontend.http.answer.generation import Generation

log = logging.getLogger(__name__)

MAX_PATH_CHARS = 256


class _Failure(msgspec.Struct):
    """Why a request was refused or has failed."""

    status: int = 0
    error: str = ""


class _Notes(_Failure):
    """What is recorded about a request and passed to observers."""

    generations: list[Generation] = []
    stages: dict[str, float] = {}  # seconds

    def add(self, stage: str, seconds: float) -> None:
        """Counts time as part of a stage."""
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds


# Of the request that the running task answers; None where nobody observes.
_NOTES: ContextVar[_Failure | None] = ContextVar("notes", default=None)


def note(generation: Generation) -> None:
    """Says that this generation answers the request under way."""
    notes = _NOTES.get()
    if isinstance(notes, _Notes):
        notes.generations.append(generation)


def note_stage(stage: str, seconds: float) -> None:
    """Says that a stage of the request under way took so long; see RequestRecord.stages."""
    notes = _NOTES.get()
    if isinstance(notes, _Notes):
        notes.add(stage, seconds)


def note_error(message: str, status: int) -> None:
    """Says why the request under way was refused or has failed. The first reason is the one that is kept.

    Args:
        status: of the answer, which may have begun before the failure.
    """
    notes = _NOTES.get()
    if notes is not None and not notes.error:
        notes.error, notes.status = message, status


class Observed:
    """ASGI middleware. The first failure of an observer is logged; none of them harms a request."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        """
        Args:
            observers: may change while requests are answered; nothing is noted while there are none.
        """
        self.app = app
        self._observers = observers
        self._failed: set[int] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._observers:
            await self.app(scope, receive, send)
        elif all([isinstance(observer, FailureObserver) for observer in self._observers]):
            await self._call_watched(scope, receive, send)
        else:
            await self._call_recorded(scope, receive, send)

    async def _call_watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request and makes a record only if it fails."""
        failure = _Failure()
        token = _NOTES.set(failure)
        started = time.monotonic()
        try:
            await self.app(scope, receive, send)
        finally:
            _NOTES.reset(token)
            if failure.error:
                seconds = time.monotonic() - started
                record = _begin(scope, time.time() - seconds, started)
                record.seconds = seconds
                record.status, record.error = failure.status, failure.error
                self.tell(record)

    async def _call_recorded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, measures its stages and makes its record."""
        notes = _Notes()
        token = _NOTES.set(notes)
        started = time.monotonic()
        record = _begin(scope, time.time(), started)
        whole = False  # the request's body has come

        async def receiving() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            begin = time.monotonic()
            message = await receive()
            notes.add("body", time.monotonic() - begin)
            whole = not message.get("more_body", False)
            return message

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            else:
                record.num_bytes += len(message.get("body", b""))
            begin = time.monotonic()
            await send(message)
            notes.add("socket", time.monotonic() - begin)

        try:
            await self.app(scope, receiving, counting)
        finally:
            _NOTES.reset(token)
            record.seconds = time.monotonic() - started
            record.stages = notes.stages
            for generation in notes.generations:
                _add(record, generation)
            record.error = notes.error
            self.tell(record)

    def refused(self, status: int, client: str, message: str) -> None:
        """Tells the observers of bytes that were refused before they became a request."""
        record = RequestRecord(method="", path="", client=client, status=status, began=time.time())
        record.error = message
        self.tell(record)

    def tell(self, record: RequestRecord) -> None:
        """Hands a record to each observer that it concerns."""
        failed = bool(record.error) or record.status >= 400
        for i, observer in enumerate(self._observers):
            if not failed and isinstance(observer, FailureObserver):
                continue
            try:
                observer(record)
            except Exception:
                if i not in self._failed:
                    self._failed.add(i)
                    log.exception("an observer of requests has failed; its further failures are not logged")


def _begin(scope: Scope, began: float, clock: float) -> RequestRecord:
    client = scope.get("client")
    return RequestRecord(
        method=scope["method"],
        path=scope["path"][:MAX_PATH_CHARS],
        client=client[0] if client else "",
        began=began,
        clock=clock,
        traceparent=_text(scope, b"traceparent"),
        tracestate=_text(scope, b"tracestate"),
    )


def _text(scope: Scope, name: bytes) -> str:
    return (header(scope, name) or b"").decode("latin-1")[:512]


def _add(record: RequestRecord, generation: Generation) -> None:
    """Sums over a request's prompts; what differs among them is the first one's."""
    sampling = generation.prompts[0].request.sampling
    record.id, record.model = generation.id, generation.model
    record.prompt_tokens += generation.prompt_tokens
    record.cached_tokens += generation.cached_tokens
    record.completion_tokens += generation.completion_tokens
    record.first_token, record.queue = generation.first_token, generation.queue
    record.finish = tuple(c.finish for p in generation.prompts for c in p.choices if c.finish is not None)
    record.temperature, record.top_p = sampling.temperature, sampling.top_p
    record.max_tokens = sampling.max_tokens
    record.stages["detokenize"] = record.stages.get("detokenize", 0.0) + generation.detokenize
    record.timings, record.late, record.gap = generation.timings, generation.late, generation.gap
    record.gone = generation.gone
