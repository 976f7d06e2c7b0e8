"""The loop's side of peers: messages between them and the policy, and whose events are whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError, UnsupportedError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.peers import Ended, PeerPolicy, PeerSide, Prefill, ToDecode, ToPrefill
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.step import StepPolicy
from pegainfer.contract.trace import StepTrace
from pegainfer.engine.peering import REQUEST_PREFIX
from pegainfer.engine.scheduler import Scheduler
from pegainfer.engine.sink import EngineSink

if TYPE_CHECKING:
    from pegainfer.engine.intake import Intake


class Peers:
    """Used on the engine's thread, but for `start`."""

    def __init__(self, side: PeerSide, policy: StepPolicy) -> None:
        """Raises UnsupportedError where the policy is no scheduler that knows peers."""
        if not isinstance(policy, Scheduler):
            raise UnsupportedError("this model's step policy knows no peers", got=type(policy).__name__)
        self._side = side
        self._policy: PeerPolicy = policy.peering

    def start(self, deliver: Callable[[ToPrefill | ToDecode], None]) -> None:
        """From any thread: `deliver` gets what peers say, until `close`."""
        self._side.start(deliver)

    def obey(self, message: ToPrefill | ToDecode, intake: Intake) -> None:
        """Takes a peer's message."""
        if not isinstance(message, Prefill):
            self._policy.from_peer(message)
            return
        try:
            intake.prefill(message, self._policy)
        except PegaError as error:
            self._side.send(Ended(message.id, str(error)))

    def send(self) -> None:
        """Passes on what the policy has for peers. After each plan and commit."""
        for message in self._policy.take_peer_messages():
            self._side.send(message)

    def are_awaited(self) -> bool:
        """Whether sequences wait for a peer."""
        return self._policy.awaits_peers()

    def close(self) -> None:
        """Ends all connections."""
        self._side.close()


class PeerFilter:
    """Implements EngineSink: keeps the events of peers' prompts from the front, which does not know them."""

    def __init__(self, sink: EngineSink) -> None:
        self._sink = sink

    def events(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        ours = [event for event in events if not event.request_id.startswith(REQUEST_PREFIX)]
        if ours or stats is not None:
            self._sink.events(ours, stats)

    def refused(self, request: GenerateRequest, error: PegaError) -> None:
        self._sink.refused(request, error)

    def adapters_changed(self, adapters: list[AdapterInfo]) -> None:
        self._sink.adapters_changed(adapters)

    def done(self, call: int, error: PegaError | None) -> None:
        self._sink.done(call, error)

    def steps(self, steps: list[StepTrace]) -> None:
        self._sink.steps(steps)

    def drained(self) -> None:
        self._sink.drained()

    def dead(self, error: EngineDeadError) -> None:
        self._sink.dead(error)
