"""Requests with a grammar on their way into the loop: compiled on a thread of their own, once a grammar.

take ─► known: a matcher at once
    └─► waiting ─► compiled on the thread ─► the loop's inbox ─► claimed: added, or cancelled meanwhile

A request that waits is not the policy's yet, so cancels of single indices wait with it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from pegainfer.contract.codec import Cancel
from pegainfer.contract.errors import EngineDeadError, PegaError, RequestError
from pegainfer.contract.grammar import GrammarFactory, Matcher
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import Constraint

# A compile recurses as deeply as its grammar is nested. The front tries each on a far smaller stack.
STACK_BYTES = 64 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A request whose grammar was compiled, or is at fault."""

    request: GenerateRequest
    matcher: Matcher | PegaError


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: GenerateRequest
    cancels: list[Cancel] = field(default_factory=list)  # of single indices


class Grammars:
    """`take` and the claims belong to the loop's thread; `deliver` is called from the compiling one."""

    def __init__(self, factory: GrammarFactory | None, deliver: Callable[[Compiled], None]) -> None:
        self._factory = factory
        self._deliver = deliver
        self._waiting: dict[str, _Waiting] = {}
        self._queue: queue.SimpleQueue[GenerateRequest] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # started with the first grammar to compile

    def take(self, request: GenerateRequest) -> Matcher | None:
        """The request's matcher; None while it is compiled. Raises RequestError without grammar support."""
        assert request.grammar is not None
        if self._factory is None:
            raise RequestError(
                "this engine has no grammar support", got=request.grammar.kind, param="grammar"
            )
        matcher = self._factory.known(request.grammar)
        if matcher is None:
            self._waiting[request.id] = _Waiting(request)
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

    def claim_compiled(self, compiled: Compiled) -> list[Cancel] | None:
        """Claims a compiled request and returns what was kept for it; None where it waits no more.

        Another one may wait under the same id.
        """
        request = compiled.request
        waiting = self._waiting.get(request.id)
        if waiting is None or waiting.request is not request:
            return None
        del self._waiting[request.id]
        return waiting.cancels

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
                continue  # it was cancelled: those behind it need not wait for its grammar
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
