"""Where the loop reports: the in-process handle, or the process's socket."""

from __future__ import annotations

from typing import Protocol

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import EngineDeadError, PegaError
from pegainfer.contract.event import EngineStats, TokenEvent
from pegainfer.contract.request import GenerateRequest
from pegainfer.contract.trace import StepTrace


class EngineSink(Protocol):
    """Where the loop reports. All methods are called on the engine's thread and must not block."""

    def events(self, events: list[TokenEvent], stats: EngineStats | None) -> None:
        """What a step brought, with a snapshot if it is time for one."""

    def refused(self, request: GenerateRequest, error: PegaError) -> None:
        """A request was not taken; no event of it will come."""

    def adapters_changed(self, adapters: list[AdapterInfo]) -> None:
        """The adapters that are loaded now; comes before the `done` of the call that changed them."""

    def done(self, call: int, error: PegaError | None) -> None:
        """A call has ended, with an error where it failed."""

    def steps(self, steps: list[StepTrace]) -> None:
        """Steps that were recorded, in order."""

    def drained(self) -> None:
        """Draining was asked for, and the last request has ended."""

    def dead(self, error: EngineDeadError) -> None:
        """The engine cannot go on. Every live request has had its ERROR events."""
