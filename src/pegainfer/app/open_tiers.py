"""The KV tiers of one rank once they are open, as the scheduler and the runner take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.peers import PeerSide
from pegainfer.contract.step import Runner, RunnerInfo
from pegainfer.contract.tiers import Tier

if TYPE_CHECKING:
    from pegainfer.kv.device.store import BlockStore


@runtime_checkable
class TieredRunner(Protocol):
    """A runner that can have tiers; see HostRunner."""

    def use_tiers(self, stores: Sequence[BlockStore], free: Callable[[], None] | None = None) -> None: ...


class OpenTiers(msgspec.Struct, frozen=True):
    """Tiers as the scheduler knows them, and where the runner keeps their blocks; () without any."""

    tiers: tuple[Tier, ...] = ()
    stores: tuple[BlockStore, ...] = ()
    free: Callable[[], None] | None = None  # gives their memory back, once they are closed
    peers: PeerSide | None = None

    def give_to(self, runner: Runner) -> None:
        """The runner, whose bounds have the tiers, takes over the stores. Raises UnsupportedError."""
        if self.stores:
            if not isinstance(runner, TieredRunner):
                raise UnsupportedError("this device has no KV tiers yet", got=type(runner).__name__)
            runner.use_tiers(self.stores, self.free)

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        for store in self.stores:
            store.close()
        if self.free is not None:
            self.free()


def with_tiers(info: RunnerInfo, opened: OpenTiers) -> RunnerInfo:
    """The bounds of a runner that has these tiers."""
    return msgspec.structs.replace(info, tiers=opened.tiers) if opened.tiers else info
