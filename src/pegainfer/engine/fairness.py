"""Who is next among several tenants: the one that was served least.

A tenant is whoever shares an API key. Each has a counter of service, in prompt tokens computed: an admission
adds the prompt's tokens that the prefix cache did not give, a generated token adds DECODE_WEIGHT. The next
request is the best-ranked of the tenant with the least service, where a level of priority counts as much
service as the engine gives in `aging_seconds`. A tenant that comes back starts at the least of those that are
there, so that nobody saves up service; what it had in excess is remembered. With one tenant nothing is
counted, and rank alone decides.
"""

from __future__ import annotations

from collections import OrderedDict

# A generated token in prompt tokens. It costs the device far more than a prompt token, but shares its step
# with all others that decode; sellers of tokens ask three to five times as much for it.
DECODE_WEIGHT = 4
MAX_ABSENT = 1024  # tenants without a live request whose counters are remembered
PACE_WEIGHT = 0.05  # of the newest step in the smoothed service a second


class Tenant:
    """One tenant's account."""

    __slots__ = ("live", "name", "service")

    def __init__(self, name: str, service: float) -> None:
        self.name = name
        self.service = service
        self.live = 0  # requests


class Tenants:
    """Accounts of the tenants that are there, and of some that were."""

    def __init__(self, aging_seconds: float) -> None:
        self._aging_seconds = aging_seconds
        self._live: dict[str, Tenant] = {}
        self._absent: OrderedDict[str, Tenant] = OrderedDict()
        self._pace = 0.0  # service a second

    @property
    def contended(self) -> bool:
        return len(self._live) > 1

    @property
    def level(self) -> float:
        """Service that one level of priority stands for."""
        return self._pace * self._aging_seconds

    def enter(self, name: str) -> Tenant:
        """A request of this tenant has come."""
        tenant = self._live.get(name)
        if tenant is None:
            least = min((t.service for t in self._live.values()), default=0.0)
            tenant = self._absent.pop(name, None) or Tenant(name, least)
            tenant.service = max(tenant.service, least)
            self._live[name] = tenant
        tenant.live += 1
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One of its requests has ended."""
        tenant.live -= 1
        if not tenant.live:
            del self._live[tenant.name]
            self._absent[tenant.name] = tenant
            if len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)

    def note_step(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """What a step gave, all tenants together, and how long it took."""
        if seconds > 0.0:
            pace = (prefill_tokens + DECODE_WEIGHT * decode_rows) / seconds
            self._pace += PACE_WEIGHT * (pace - self._pace) if self._pace else pace
