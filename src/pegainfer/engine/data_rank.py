"""What the scheduler keeps for each data-parallel rank."""

from __future__ import annotations

from pegainfer.engine.queues import Ranked
from pegainfer.engine.sequence import Sequence
from pegainfer.kv.manager import KVManager


class DataRankState:
    """A data-parallel rank's slots and pools, and the sequences that run there. There is always one."""

    __slots__ = ("blocked", "free_slots", "kv", "number", "running", "slots")

    def __init__(self, number: int, slots: range, kv: KVManager) -> None:
        """
        Args:
            slots: those that sequences may use.
            kv: of the rank's own pools.
        """
        self.number = number
        self.slots = slots
        self.free_slots = list(reversed(slots))
        self.kv = kv
        self.running = Ranked()
        # A sequence that could not be admitted, and the blocks there were then.
        self.blocked: tuple[Sequence, int] | None = None

    def is_blocked(self, seq: Sequence) -> bool:
        """Whether `seq` did not fit before, and no block has become available since."""
        blocked = self.blocked
        return blocked is not None and blocked[0] is seq and self.kv.num_available() <= blocked[1]
