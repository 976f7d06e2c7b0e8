"""Objects that release resources when their engine ends."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Closing(Protocol):
    """An object with threads or connections, for example a step policy that publishes KV events."""

    def close(self) -> None:
        """Called once, after the last step."""
