"""What the scheduler does with the tiers below the device: loads, saves, prefetches, resets.

queued ─► prefetch (disk to host) ─► about to be admitted ─► load ─► LOADING ─► in the queue again
admitted with a hit, or preempted ─► save
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TierStats
from pegainfer.contract.step import PageGroup, RunnerInfo
from pegainfer.contract.tiers import Traffic
from pegainfer.engine.batch import Batch
from pegainfer.engine.cost import StepCost
from pegainfer.engine.data_rank import DataRankState
from pegainfer.engine.queues import Ranked, Waiting
from pegainfer.engine.restore_cost import RestoreCost
from pegainfer.engine.sequence import Sequence, Status
from pegainfer.kv.prefix import PrefixHit

if TYPE_CHECKING:
    from pegainfer.kv.moves import Load

HOST = 1  # pool number of the fastest tier


class Tiering:
    """Does nothing on a device without tiers. Mutates pools, batches and the queue."""

    def __init__(
        self,
        homes: Seq[DataRankState],
        waiting: Waiting,
        loading: Ranked,
        info: RunnerInfo,
        cost: StepCost,
    ) -> None:
        """
        Args:
            loading: where sequences are that a load is under way for.
            cost: prices of what a load saves.
        """
        self._loading = loading
        self._ranks = [(home, home.kv.tiers) for home in homes if home.kv.tiers is not None]
        self._waiting = waiting
        self._cost = cost
        self._restores = RestoreCost(len(info.tiers))
        self._groups = info.kv.groups
        self._queued: list[Sequence] = []  # that no prefetch has looked at yet
        self._started: dict[int, tuple[float, dict[int, int]]] = {}  # id of a load -> time, bytes by pool
        self._refused = [0] * len(info.tiers)
        self._loaded = [(0, 0.0)] * len(info.tiers)  # bytes, seconds
        self._saved = [(0, 0.0)] * len(info.tiers)
        self.now = 0.0  # seconds; set before each schedule and commit

    def queue(self, seq: Sequence) -> None:
        """A sequence has entered the queue for the first time."""
        if self._ranks:
            self._queued.append(seq)

    def load(self, seq: Sequence, hit: PrefixHit, spare: Seq[int], batch: Batch) -> bool:
        """Starts to load what the rank's lower tiers have of a waiting sequence's prefix beyond `hit`.

        False, and nothing changed, where that is nothing, would take longer than to compute it, was tried
        before, or finds no room.

        Args:
            spare: blocks of each group that must stay available.
        """
        tiers = batch.home.kv.tiers
        if tiers is None or seq.loaded or not seq.may_use_prefix:
            return False
        taken: dict[int, int] = {}

        def worth(start: int, end: int, nbytes: dict[int, int]) -> bool:
            taken.update(nbytes)
            fine = self._restores.is_worth(nbytes, self._cost.prefill(start, end - start))
            if not fine:
                self._refused[max(nbytes) - 1] += 1
                seq.loaded = True  # the answer would be the same at the next step
            return fine

        load = tiers.load(seq, seq.hashes, seq.target, hit, spare, worth, seq.owner)
        if load is None:
            return False
        joined = len(load.owners) > 1
        if not joined:
            self._started[id(load)] = self.now, taken
            batch.transfers += load.transfers
        self._waiting.remove(seq)
        self._loading.add(seq)
        seq.status = Status.LOADING
        seq.loaded = not joined  # another one's load may bring less than there is
        return True

    def pull(self, seq: Sequence, spare: Seq[int], batch: Batch) -> bool:
        """Starts to load what there is of the prefix of a sequence that a peer prefills; see `load`."""
        kv = batch.home.kv
        if kv.tiers is None:
            return False
        hit = kv.find(seq.hashes, seq.target)
        load = kv.tiers.load(seq, seq.hashes, seq.target, hit, spare, account=seq.owner)
        if load is not None and len(load.owners) == 1:
            self._started[id(load)] = self.now, {}
            batch.transfers += load.transfers
        return load is not None

    def end_transfers(self, landed: Iterable[int], failed: Iterable[int], traffic: Iterable[Traffic]) -> None:
        """Transfers have ended; sequences whose last one it was are in the queue again.

        What could not be loaded is computed.
        """
        for ids, well in ((landed, True), (failed, False)):
            for transfer in ids:
                if not any([tiers.end(transfer, landed=well) for _, tiers in self._ranks]):
                    raise InvariantError(f"transfer {transfer} has ended, but was not in flight")
        for _, tiers in self._ranks:
            for load in tiers.take_loaded():
                self._end_load(load)
        for t in traffic:
            if t.source_pool > t.target_pool:
                self._loaded[t.source_pool - 1] = _plus(self._loaded[t.source_pool - 1], t)
            else:
                self._saved[t.target_pool - 1] = _plus(self._saved[t.target_pool - 1], t)

    def _end_load(self, load: Load) -> None:
        started, nbytes = self._started.pop(id(load))
        if not load.failed:
            self._restores.observe(nbytes, self.now - started)
        for seq in load.owners:
            if seq.peer is not None:  # more may come
                seq.peer.loading, seq.peer.fresh = False, True
            elif seq.status is Status.LOADING:  # otherwise it has ended meanwhile
                self._loading.remove(seq)
                seq.status = Status.WAITING
                self._waiting.add(seq)

    def save_hit(self, seq: Sequence, home: DataRankState, hit: PrefixHit) -> None:
        """A prefix is used a second time, by a sequence that holds it: it will be a third time."""
        if home.kv.tiers is not None:
            for g, blocks in enumerate(hit.blocks):
                home.kv.tiers.saver.save(g, blocks, seq.owner)

    def save_preempted(self, seq: Sequence, home: DataRankState) -> None:
        """Before a sequence loses its blocks: they are saved where loading them beats computing them."""
        tiers, kv = home.kv.tiers, seq.kv
        if tiers is None or kv is None:
            return
        nbytes = sum(
            group.bytes_per_block * len(kv.tables[g])
            for g, group in enumerate(self._groups)
            if isinstance(group, PageGroup)
        )
        price = self._cost.prefill(0, seq.computed)
        if not price or self._restores.seconds({HOST: nbytes}) <= price:
            for g, table in enumerate(kv.tables):
                tiers.saver.save(g, table, seq.owner)

    def start_saves(self, batches: Iterable[Batch]) -> None:
        """Adds the transfers that nobody waits for: prefetches, saves, and spills of scarce pools."""
        queued, self._queued = self._queued, []
        for batch in batches:
            tiers = batch.home.kv.tiers
            if tiers is not None:
                for seq in queued:
                    if seq.status is Status.WAITING and seq.may_use_prefix:
                        batch.transfers += tiers.saver.prefetch(seq.hashes, seq.target)
                batch.transfers += tiers.saver.spill()

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return sum([tiers.in_flight for _, tiers in self._ranks])

    @property
    def has_work(self) -> bool:
        """Whether plans are needed even where no sequence is live."""
        return bool(self.in_flight or any([t.must_reset or t.saver.has_wanted for _, t in self._ranks]))

    def take_reset(self) -> bool:
        """Whether the next plan has to reset the runner's tiers; once."""
        wanted = any([tiers.must_reset for _, tiers in self._ranks])
        for _, tiers in self._ranks:
            tiers.must_reset = False
        return wanted

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier, summed over the data-parallel ranks."""
        if not self._ranks:
            return ()
        out = []
        for i, of_ranks in enumerate(zip(*[tiers.stats() for _, tiers in self._ranks], strict=True)):
            totals = {
                name: sum(getattr(one, name) for one in of_ranks)
                for name in ("total_blocks", "cached_blocks", "in_flight", "hit_tokens", "failures")
            }
            one = msgspec.structs.replace(
                of_ranks[0], **totals, refused_loads=self._refused[i],
                loaded_bytes=self._loaded[i][0], loaded_seconds=self._loaded[i][1],
                saved_bytes=self._saved[i][0], saved_seconds=self._saved[i][1],
            )  # fmt: skip
            out.append(one)
        return tuple(out)


def _plus(before: tuple[int, float], traffic: Traffic) -> tuple[int, float]:
    return before[0] + traffic.nbytes, before[1] + traffic.seconds
