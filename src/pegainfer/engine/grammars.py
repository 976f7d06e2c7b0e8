"""Requests with a grammar on their way into the loop: compiled on a thread of their own, once a grammar.

take ─► known: a matcher at once
    └─► waiting ─► compiled on the thread ─► the loop's inbox ─► claimed: added, or ended meanwhile

A request that waits is not the policy's yet, so cancels of single indices wait with it, and its deadline is
watched here.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable

import msgspec

from pegainfer.contract.codec import Cancel
from pegainfer.contract.errors import DeadlineError, EngineDeadError, PegaError, RequestError
from pegainfer.contract.event import TokenEvent, error_events
from pegainfer.contract.grammar import GrammarFactory, Matcher
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Constraint
from pegainfer.engine.early_ends import not_started, passed

# A compile recurses as deeply as its grammar is nested. The front tries each on a far smaller stack.
STACK_BYTES = 64 << 20

log = logging.getLogger(__name__)


class Compiled(msgspec.Struct, frozen=True):
    """A request whose grammar was compiled, or is at fault."""

    request: GenerateRequest
    matcher: Matcher | PegaError


class Waiting(msgspec.Struct, frozen=True):
    """A request whose grammar is being compiled."""

    request: GenerateRequest
    since: float  # seconds
    cancels: list[Cancel] = msgspec.field(default_factory=list)  # of single indices


class Grammars:
    """`take` and the claims belong to the loop's thread; `deliver` is called from the compiling one."""

    def __init__(
        self, factory: GrammarFactory | None, deliver: Callable[[Compiled], None], max_wait: float
    ) -> None:
        """
        Args:
            max_wait: seconds until a request that was not started is given up; 0: never.
        """
        self._factory = factory
        self._deliver = deliver
        self._max_wait = max_wait
        self._waiting: dict[str, Waiting] = {}
        self._due = math.inf  # seconds; none that waits ends at its deadline before
        self._queue: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first grammar to compile

    def take(self, request: GenerateRequest, now: float) -> Matcher | None:
        """The request's matcher; None while it is compiled. Raises RequestError without grammar support.

        Args:
            now: seconds; what a request that is compiled has waited since.
        """
        assert request.grammar is not None
        if self._factory is None:
            raise RequestError(
                "this engine has no grammar support", got=request.grammar.kind, param="grammar"
            )
        matcher = self._factory.known(request.grammar)
        if matcher is None:
            waiting = self._waiting[request.id] = Waiting(request, now)
            self._due = min(self._due, self._due_of(waiting))
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile, name="grammars", daemon=True)
                before = threading.stack_size(STACK_BYTES)
                self._thread.start()
                threading.stack_size(before)
            self._queue.put(request)
        return matcher

    def keep_cancel(self, cancel: Cancel) -> bool:
        """Keeps the cancel of an index until its request is claimed; False where that does not wait."""
        waiting = self._waiting.get(cancel.request_id)
        if waiting is not None:
            waiting.cancels.append(cancel)
        return waiting is not None

    def claim(self, request_id: str) -> GenerateRequest | None:
        """Takes a request out of those that wait; None where it is not, or no longer, among them."""
        waiting = self._waiting.pop(request_id, None)
        return None if waiting is None else waiting.request

    def claim_compiled(self, compiled: Compiled) -> Waiting | None:
        """Claims a compiled request with what was kept for it; None where it waits no more.

        Another one may wait under the same id.
        """
        request = compiled.request
        waiting = self._waiting.get(request.id)
        if waiting is None or waiting.request is not request:
            return None
        del self._waiting[request.id]
        return waiting

    def seconds_left(self, now: float) -> float | None:
        """Until `expired` must be asked again; None where no deadline is near enough to wait for."""
        left = self._due - now
        return max(0.0, left) if left < threading.TIMEOUT_MAX else None

    def expired(self, now: float) -> list[TokenEvent]:
        """Ends the requests whose deadline has passed, as the policy ends those that are queued."""
        if now < self._due:
            return []
        events: list[TokenEvent] = []
        for waiting in tuple(self._waiting.values()):
            late = self._late(waiting, now)
            if late is not None:
                del self._waiting[waiting.request.id]
                events += error_events(waiting.request.id, range(waiting.request.n), late)
        self._due = min(map(self._due_of, self._waiting.values()), default=math.inf)
        return events

    def _due_of(self, waiting: Waiting) -> float:
        due = waiting.since + self._max_wait if self._max_wait else math.inf
        deadline = waiting.request.deadline
        return deadline if deadline is not None and deadline < due else due

    def _late(self, waiting: Waiting, now: float) -> DeadlineError | None:
        deadline = waiting.request.deadline
        if deadline is not None and deadline <= now:
            return passed(deadline, now)
        if self._max_wait and waiting.since + self._max_wait <= now:
            return not_started(self._max_wait)
        return None

    def masks(self, rows: dict[int, Constraint]) -> dict[int, bytes]:
        """Masks for the rows that can go on."""
        if not rows:
            return {}
        assert self._factory is not None
        matchers, ends = [c.matcher for c in rows.values()], [c.may_end for c in rows.values()]
        try:
            found = self._factory.masks(matchers, ends=ends)
        except BaseException:  # these requests will leave their grammars and fail; the others must go on
            log.exception("the grammars' library failed")
            return {}
        return {row: mask for row, mask in zip(rows, found, strict=True) if mask is not None}

    def _compile(self) -> None:
        while True:
            request = self._queue.get()
            waiting = self._waiting.get(request.id)
            if waiting is None or waiting.request is not request:
                continue  # it has ended: those behind it need not wait for its grammar
            assert request.grammar is not None and self._factory is not None
            result: Matcher | PegaError
            try:
                # Who asked for the same one a moment earlier has waited for it too.
                result = self._factory.known(request.grammar) or self._factory.compile(request.grammar)
            except PegaError as error:
                result = error
            except BaseException as error:  # a Rust panic is no Exception
                log.exception("a grammar failed to compile")
                result = RequestError(
                    "the grammar does not compile", got=type(error).__name__, param="grammar"
                )
            try:
                self._deliver(Compiled(request, result))
            except EngineDeadError:
                return
