"""What has something to release at an engine's end."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Closing(Protocol):
    """A step policy, for example, that owns threads or connections."""

    def close(self) -> None:
        """Called once, after the last step."""
