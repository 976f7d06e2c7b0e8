"""What loading a prefix from lower tiers costs, learnt from the loads before.

A load's time is fitted as seconds = a + b · bytes for each slowest tier that took part. It runs from the plan
that starts the load to the commit that ends it, so it contains queues, and steps in between.
"""

from __future__ import annotations

MEMORY = 0.9  # weight of the past at each observation
PROBE = 16  # one in so many refused loads is made nevertheless: a tier may be faster than it was


class _Line:
    """Decaying least squares of y = a + b · x, neither below zero."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        self._n = MEMORY * self._n + 1.0
        self._x = MEMORY * self._x + x
        self._y = MEMORY * self._y + y
        self._xx = MEMORY * self._xx + x * x
        self._xy = MEMORY * self._xy + x * y

    def at(self, x: float) -> float:
        """0 before the first observation."""
        if not self._n:
            return 0.0
        mean_x, mean_y = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_x * mean_x
        if variance < 1e-6 * mean_x * mean_x:  # all of one size: nothing tells latency from bandwidth
            return mean_y * x / mean_x if mean_x else mean_y
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / variance)
        intercept = mean_y - slope * mean_x
        if intercept < 0.0:  # through the origin
            return x * self._xy / self._xx
        return intercept + slope * x


class RestoreCost:
    """Knows nothing of a tier until a load from it has ended: then its price is 0."""

    def __init__(self, num_tiers: int) -> None:
        self._lines = [_Line() for _ in range(num_tiers)]
        self._refused = 0

    def observe(self, nbytes: dict[int, int], seconds: float) -> None:
        """A load of so many bytes from each pool number has ended."""
        if nbytes and seconds > 0.0:
            self._lines[max(nbytes) - 1].add(sum(nbytes.values()), seconds)

    def seconds(self, nbytes: dict[int, int]) -> float:
        """Expected time of a load."""
        return self._lines[max(nbytes) - 1].at(sum(nbytes.values())) if nbytes else 0.0

    def is_worth(self, nbytes: dict[int, int], compute_seconds: float) -> bool:
        """Whether to load rather than to compute; always while either price is unknown."""
        if compute_seconds <= 0.0 or self.seconds(nbytes) <= compute_seconds:
            return True
        self._refused += 1
        return self._refused % PROBE == 0
