"""What the engine is told of the ranks that make one runner."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class RankedRunner(Protocol):
    """A runner that is made of several ranks."""

    def rank_seconds(self) -> tuple[float, ...]:
        """Each rank's time in steps since the start, in their order. Called on any thread."""
