"""What comes out of the loop's inbox, obeyed on the engine's thread: requests, cancels, calls, draining."""

from __future__ import annotations

from pegainfer.contract.codec import Cancel, LoadAdapter, ResetPrefixCache, UnloadAdapter
from pegainfer.contract.errors import PegaError, QueueFullError, RequestError
from pegainfer.contract.event import FinishReason, TokenEvent
from pegainfer.contract.grammar import Matcher
from pegainfer.contract.peers import PeerPolicy, Prefill
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import StepPolicy
from pegainfer.engine.adapter_loader import AdapterLoaded, AdapterRead
from pegainfer.engine.controls import Control, Controls
from pegainfer.engine.grammars import Compiled, Grammars
from pegainfer.engine.peering import REQUEST_PREFIX
from pegainfer.engine.pipeline import Clock
from pegainfer.engine.sink import EngineSink
from pegainfer.engine.snapshots import Snapshots

DRAIN_RETRY = 5.0  # Retry-After in seconds while draining: another server will have taken over

# None begins to drain: requests that came before it are still taken.
Message = GenerateRequest | Compiled | Cancel | Control | None


class Intake:
    """Owns the table of open requests: those that were taken and have an index without a finish."""

    def __init__(
        self,
        policy: StepPolicy,
        sink: EngineSink,
        grammars: Grammars,
        snapshots: Snapshots,
        controls: Controls,
        clock: Clock,
    ) -> None:
        self._policy = policy
        self._sink = sink
        self._grammars = grammars
        self._snapshots = snapshots
        self._controls = controls
        self._clock = clock
        self._draining = False
        self.open: dict[str, set[int]] = {}  # indices without a finish, by request

    @property
    def drained(self) -> bool:
        """Whether draining was asked for, and the last request has ended."""
        return self._draining and not self.open

    def note_finishes(self, events: list[TokenEvent]) -> bool:
        """Closes the indices that end with these events; False where none does."""
        finishes = [(event.request_id, event.index) for event in events if event.finish is not None]
        for request_id, index in finishes:
            indices = self.open[request_id]
            indices.remove(index)
            if not indices:
                del self.open[request_id]
        return bool(finishes)

    def obey(self, message: Message) -> list[TokenEvent]:
        """Does what a message asks; returns the finishes of requests that it ends at once."""
        match message:
            case GenerateRequest():
                self._admit(message)
            case None:
                self._draining = True
            case Cancel():
                return self._cancel(message)
            case Compiled():
                waiting = self._grammars.claim_compiled(message)
                if waiting is None:
                    return []  # it has ended meanwhile
                del self.open[message.request.id]
                self._add(message.request, message.matcher, waiting.since, self._clock())
                for cancel in waiting.cancels:
                    self._policy.cancel(cancel.request_id, cancel.index)
            case LoadAdapter() | UnloadAdapter() | ResetPrefixCache() | AdapterRead() | AdapterLoaded():
                return self._controls.obey(message)
        return []

    def prefill(self, message: Prefill, peering: PeerPolicy) -> None:
        """Takes a peer's prompt. Raises PegaError."""
        if self._draining:
            raise QueueFullError("the engine is shutting down", retry_after=DRAIN_RETRY)
        peering.prefill_for_peer(message, self._clock())
        self.open[REQUEST_PREFIX + message.id] = {0}

    def _cancel(self, cancel: Cancel) -> list[TokenEvent]:
        if cancel.index is not None and self._grammars.keep_cancel(cancel):
            return []
        waiting = self._grammars.claim(cancel.request_id)
        if waiting is None:
            self._policy.cancel(cancel.request_id, cancel.index)
            return []
        return [
            TokenEvent(request_id=waiting.id, index=index, finish=FinishReason.ABORT)
            for index in range(waiting.n)
        ]

    def _admit(self, request: GenerateRequest) -> None:
        """A new request: added at once, or when its grammar is compiled."""
        matcher: Matcher | PegaError | None = None
        now = self._clock()
        try:
            if self._draining:
                raise QueueFullError("the server is shutting down", retry_after=DRAIN_RETRY)
            if request.id.startswith(REQUEST_PREFIX):
                raise RequestError(
                    "request ids of this form belong to peers", got=request.id[:64], param="request_id"
                )
            if request.id in self.open:
                raise RequestError("a live request has this id", got=request.id[:64], param="request_id")
            if request.grammar is not None:
                matcher = self._grammars.take(request, now)
                if matcher is None:
                    self.open[request.id] = set(range(request.n))
                    return
        except PegaError as error:
            matcher = error
        self._add(request, matcher, now)

    def _add(
        self,
        request: GenerateRequest,
        matcher: Matcher | PegaError | None,
        arrived: float,
        ready: float = 0.0,
    ) -> None:
        """Queues a request, or refuses it: because of its grammar, or because of what the policy says."""
        try:
            if isinstance(matcher, PegaError):
                raise matcher
            self._policy.add(request, arrived, matcher, ready)
            self.open[request.id] = set(range(request.n))
        except PegaError as error:
            self._snapshots.refused(counted=error is not matcher)
            self._sink.refused(request, error)
