"""Sequences in order of rank: those that run, and those that wait, which are also kept by tenant."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from pegainfer.contract.errors import InvariantError
from pegainfer.engine.fairness import Tenant, Tenants
from pegainfer.engine.sequence import Sequence

_rank = attrgetter("rank")


class Ranked:
    """Sequences, the best-ranked first."""

    __slots__ = ("items", "num_tokens")

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        self.num_tokens = 0  # prompt tokens, summed

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, seq: Sequence) -> None:
        insort(self.items, seq, key=_rank)
        self.num_tokens += seq.num_prompt

    def remove(self, seq: Sequence) -> None:
        """Raises InvariantError for one that is not in it."""
        i = bisect_left(self.items, seq.rank, key=_rank)
        if i == len(self.items) or self.items[i] is not seq:
            raise InvariantError(f"sequence {seq.number} is not in its queue")
        del self.items[i]
        self.num_tokens -= seq.num_prompt


class Waiting(Ranked):
    """The queue. `first` is who should be admitted next, which need not be the best-ranked."""

    __slots__ = ("_tenants", "by_tenant")

    def __init__(self, tenants: Tenants) -> None:
        super().__init__()
        self._tenants = tenants
        self.by_tenant: dict[Tenant, Ranked] = {}

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        self.by_tenant.setdefault(seq.tenant, Ranked()).add(seq)

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        queue = self.by_tenant[seq.tenant]
        queue.remove(seq)
        if not queue.items:
            del self.by_tenant[seq.tenant]

    def first(self) -> Sequence:
        """The next to admit. One that ran before goes on first: it was charged already."""
        best = self.items[0]
        if len(self.by_tenant) < 2 or best.entered:
            return best
        return min((queue.items[0] for queue in self.by_tenant.values()), key=self._turn)

    def outranks(self, seq: Sequence, running: Sequence) -> bool:
        """Whether `seq`, which waits, may take the place of one that runs."""
        if seq.rank > running.rank:
            return False
        if seq.entered or seq.tenant is running.tenant:
            return True
        return self._turn(seq)[0] < self._turn(running)[0]

    def _turn(self, seq: Sequence) -> tuple[float, float, int]:
        served = seq.tenant.service + seq.request.priority * self._tenants.level
        return served, *seq.rank
