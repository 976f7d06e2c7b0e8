"""Which snapshots of the statistics go out, and when: with finishes, at rest, and now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from pegainfer.contract.event import EngineStats
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.peers import PeerStats
from pegainfer.contract.step import StepPolicy

STATS_PERIOD = 0.05  # seconds between two snapshots while steps go on; finishes and idleness bring their own


class Snapshots:
    """Taken on the engine's thread; `latest` may be read from any. Times are seconds of the loop's clock."""

    def __init__(
        self,
        policy: StepPolicy,
        host_seconds: Mapping[str, float],
        expert_tokens: Callable[[], ExpertTokens | None] = lambda: None,
        peers: Callable[[], tuple[PeerStats, ...]] = tuple,
        rank_seconds: Callable[[], tuple[float, ...]] = tuple,
    ) -> None:
        """
        Args:
            host_seconds: as EngineStats has them; read at each snapshot.
            expert_tokens, peers, rank_seconds: likewise; called at each snapshot.
        """
        self._policy = policy
        self._host_seconds = host_seconds
        self._expert_tokens = expert_tokens
        self._peers = peers
        self._rank_seconds = rank_seconds
        self._at = 0.0
        self._quiet = False  # the last one says that the engine is idle
        self._refusals = 0
        self.latest = EngineStats()

    def take(self, now: float) -> EngineStats:
        """A new one; it is `latest` too."""
        stats = self._policy.stats()
        self.latest = msgspec.structs.replace(
            stats,
            rejections=stats.rejections + self._refusals,
            host_seconds=dict(self._host_seconds),
            experts=self._expert_tokens(),
            peers=self._peers(),
            rank_seconds=self._rank_seconds(),
        )
        self._at = now
        return self.latest

    def refused(self, *, counted: bool) -> None:
        """A request was refused; `counted` by the policy already."""
        self._quiet = False
        self._refusals += not counted

    def with_events(self, now: float, *, finishes: bool) -> EngineStats | None:
        """The one to go out with a step's events; None where it is too early for one."""
        self._quiet = False
        return self.take(now) if finishes or now - self._at >= STATS_PERIOD else None

    def at_work(self, now: float) -> EngineStats | None:
        """The one to go out as a step starts: a prompt in chunks gives no event for many steps."""
        if not self._quiet and now - self._at < STATS_PERIOD:
            return None
        self._quiet = False
        return self.take(now)

    def at_rest(self, now: float) -> EngineStats | None:
        """The one that says that the engine is idle; None where it was said."""
        if self._quiet:
            return None
        self._quiet = True
        return self.take(now)
