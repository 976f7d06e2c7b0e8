"""What a runner of several ranks reports of them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class RankedRunner(Protocol):
    """A runner that is made of several ranks."""

    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank has spent in steps since the start, in the order of the ranks.

        They include what a rank waits for the others within a step. Called on any thread.
        """
