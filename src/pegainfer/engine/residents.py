"""Who holds slots and blocks, who waits for them, and how they change hands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from pegainfer.contract.adapter import NO_ADAPTER, AdapterLoad
from pegainfer.contract.errors import ConfigError, InvariantError
from pegainfer.contract.step import NewSlot, PageGroup, RunnerInfo, SlotBlocks
from pegainfer.engine.adapters import AdapterTable
from pegainfer.engine.batch import Batch
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.cost import StepCost
from pegainfer.engine.data_rank import DataRankState
from pegainfer.engine.fairness import Tenants
from pegainfer.engine.queues import Ranked, Waiting
from pegainfer.engine.sequence import Sequence, Status
from pegainfer.engine.tiering import Tiering
from pegainfer.kv.manager import KVManager
from pegainfer.kv.prefix import PrefixHit

NO_SLOT = -1


class Residents:
    """Slots and blocks go out at `enter` and `adopt`, come back at `leave`, and are used again once the last
    plan with a row of their sequence is retired."""

    def __init__(self, info: RunnerInfo, config: SchedulerConfig, cost: StepCost) -> None:
        """`cost`: of what sequences compute, which decides what is worth loading."""
        self.num_slots = min(info.max_slots, config.max_slots or info.max_slots)
        self.homes = _data_ranks(info, config, self.num_slots)
        self.unit = self.homes[0].kv.unit  # tokens that one hash covers
        self.loading = Ranked()
        self.tenants = Tenants(config.aging_seconds)
        self.adapters: AdapterTable[Sequence] = AdapterTable(info.max_adapters)
        self.waiting = Waiting(self.tenants)
        self.tiering = Tiering(self.homes, self.waiting, self.loading, info, cost)
        self.frees: list[int] = []  # slots that the next plan drops
        self.num_preemptions = 0
        self.no_spare = [0] * len(info.kv.groups)
        # What admissions leave to those that run; a state is allocated only once, so it needs no reserve.
        self.watermark = [
            math.ceil(config.watermark * n) if isinstance(g, PageGroup) else 0
            for g, n in zip(info.kv.groups, info.num_blocks, strict=True)
        ]
        self._leaving: dict[int, list[int]] = {}  # slots by the step after which they are free
        self.retired = 0
        self._rank_of = info.rank_of

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return sum([len(home.running.items) for home in self.homes])

    def enter(self, seq: Sequence, hit: PrefixHit, positions: int, batch: Batch) -> None:
        """Moves `seq` from the queue into a slot of the batch's rank. A free slot and the blocks are there.

        If others of the queue outrank it, it moves up before them, so that they do not take its place now.
        """
        kv, copies = batch.home.kv.begin(seq.root, seq.hashes, hit, positions, step=batch.step)
        kv.owner = seq.owner
        kv.adapter, kv.cache_salt = seq.request.adapter, seq.request.cache_salt
        seq.kv = kv
        seq.computed = seq.planned = hit.num_tokens
        batch.copies += copies
        self.tiering.save_hit(seq, batch.home, hit)
        seq.loaded = False
        self.waiting.remove(seq)
        if self.waiting.items and (best := self.waiting.items[0].rank) < seq.rank:
            seq.rank = (math.nextafter(best[0], -math.inf), seq.number)
        self._settle(seq, batch)

    def claim_adapter(self, seq: Sequence) -> bool:
        """Whether a waiting sequence has no adapter or holds it; else it leaves the queue until it does."""
        if seq.adapter is not None and not seq.holds_adapter:
            if not self.adapters.claim(seq.adapter, seq):
                self.set_aside(seq)
                return False
            seq.holds_adapter = True
        return True

    def take_adapter_loads(self) -> list[AdapterLoad]:
        self.queue_again(self.adapters.assign(), holds_adapter=True)
        return self.adapters.take_loads(self.retired)

    def set_aside(self, seq: Sequence) -> None:
        """A sequence leaves the queue until `queue_again`."""
        self.waiting.remove(seq)
        self.loading.add(seq)
        seq.status = Status.LOADING

    def queue_again(self, seqs: Iterable[Sequence], *, holds_adapter: bool) -> None:
        """What sequences waited for is there."""
        for seq in seqs:
            seq.holds_adapter = seq.holds_adapter or holds_adapter
            self.loading.remove(seq)
            seq.status = Status.WAITING
            self.waiting.add(seq)

    def adopt(self, child: Sequence, parent: Sequence, positions: int, batch: Batch) -> bool:
        """Forks `child` off `parent` into a slot of the same rank, which is the batch's.

        False, and nothing changed, where there is no room.
        """
        if not batch.home.free_slots or parent.kv is None:
            return False
        forked = batch.home.kv.fork(parent.kv, parent.num_prompt - 1, positions, step=batch.step)
        if forked is None:
            return False
        child.kv, copies = forked
        child.holds_adapter = child.holds_adapter or self.adapters.share(child.adapter)
        child.computed = child.planned = parent.num_prompt - 1
        batch.copies += copies
        self._settle(child, batch)
        return True

    def _settle(self, seq: Sequence, batch: Batch) -> None:
        home = batch.home
        slot = home.free_slots.pop()
        seq.slot = slot
        seq.data_rank = home.number
        seq.status = Status.RUNNING
        home.running.add(seq)
        batch.news.append(
            NewSlot(
                slot=slot,
                seq=seq.number,
                tokens=seq.packed_tokens(),
                num_prompt=seq.num_prompt,
                sampling=seq.runner_sampling(),
                seed=seq.seed,
                mask_tokens=seq.mask_tokens,
                adapter=NO_ADAPTER if seq.adapter is None else seq.adapter.slot,
            )
        )
        assert seq.kv is not None
        for group, table in enumerate(seq.kv.tables):
            batch.blocks.append(SlotBlocks(slot, group, tuple(table)))

    def cover(self, seq: Sequence, least: int, most: int, batch: Batch) -> int:
        """Grows the tables of `seq` towards `most` positions and returns how many they cover.

        Worse-ranked sequences of the same data-parallel rank are preempted until at least `least` are
        covered. If even that must wait for plans in flight, 0 is returned and the batch turns hungry.
        """
        kv, manager = seq.kv, batch.home.kv
        assert kv is not None
        while not batch.hungry:
            room = manager.room(kv)
            if room >= least:
                for group, blocks in manager.grow(kv, min(room, most)):
                    batch.blocks.append(SlotBlocks(seq.slot, group, blocks))
                return min(kv.capacity, most)
            victim = batch.home.running.items[-1]
            # Blocks that are already on their way back need no further victim.
            if victim is seq or manager.room(kv, with_deferred=True) >= least:
                batch.hungry = True
            else:
                self.preempt(victim)
        return min(kv.capacity, most) if kv.capacity >= least else 0

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the queue; it will be computed anew from its known tokens."""
        self.num_preemptions += 1
        seq.preemptions += 1
        self.tiering.save_preempted(seq, self.homes[seq.data_rank])
        self.leave(seq)
        seq.computed = seq.planned = 0
        seq.status = Status.WAITING
        self.waiting.add(seq)

    def leave(self, seq: Sequence) -> None:
        """A running sequence gives up its slot and blocks, after its last plan."""
        assert seq.kv is not None
        home = self.homes[seq.data_rank]
        home.running.remove(seq)
        home.kv.release(seq.kv, seq.last_step)
        if seq.last_step <= self.retired:
            self._free_slot(seq.slot)
        else:
            self._leaving.setdefault(seq.last_step, []).append(seq.slot)
            seq.left_kv = seq.kv
        if len(seq.kv.hashes) > len(seq.hashes):
            seq.hashes = seq.kv.hashes
        seq.kv = None
        seq.slot = NO_SLOT

    def retire(self, step: int) -> None:
        """Step `step` is committed: what waited for it is free."""
        self.retired = step
        for home in self.homes:
            home.kv.retire(step)
        for slot in self._leaving.pop(step, ()):
            self._free_slot(slot)

    def is_retired(self, step: int) -> bool:
        return step <= self.retired

    def _free_slot(self, slot: int) -> None:
        self.frees.append(slot)
        self.homes[self._rank_of(slot)].free_slots.append(slot)

    def check_integrity(self) -> None:
        """Raises InvariantError: slots and block references belong to exactly one holder."""
        self.adapters.check_integrity()
        left = [slot for slots in self._leaving.values() for slot in slots]
        for home in self.homes:
            home.kv.check_integrity()
            held = [seq.slot for seq in home.running]
            leaving = [slot for slot in left if self._rank_of(slot) == home.number]
            if sorted(held + leaving + home.free_slots) != list(home.slots):
                raise InvariantError(
                    f"slots held {held}, leaving {leaving}, free {home.free_slots} are no partition"
                )
            if any(seq.data_rank != home.number for seq in home.running):
                raise InvariantError(f"a sequence of another rank runs on data-parallel rank {home.number}")
        if any(seq.status is not Status.LOADING or seq.kv is not None for seq in self.loading):
            raise InvariantError("a sequence among the loading ones is not loading, or has blocks")
        running = [seq for home in self.homes for seq in home.running]
        if any(seq.adapter is not None and not seq.holds_adapter for seq in running):
            raise InvariantError("a sequence runs without holding its adapter's slot")
        queues = [(home.running, Status.RUNNING) for home in self.homes]
        for queue, status in (*queues, (self.waiting, Status.WAITING)):
            ranks = [seq.rank for seq in queue]
            if ranks != sorted(ranks):
                raise InvariantError(f"the {status.value} sequences are out of rank")
            if queue.num_tokens != sum(seq.num_prompt for seq in queue):
                raise InvariantError(f"the token count of the {status.value} sequences is wrong")
            for seq in queue:
                if seq.status is not status or (seq.kv is None) == (status is Status.RUNNING):
                    raise InvariantError(
                        f"sequence {seq.number} is {seq.status.value} among the {status.value}"
                    )
                ahead = seq.computed > seq.planned and not seq.uncommitted
                if ahead or not 0 <= seq.computed <= len(seq.tokens):
                    raise InvariantError(
                        f"sequence {seq.number}: computed {seq.computed}, planned {seq.planned}, "
                        f"known {len(seq.tokens)}"
                    )


def _data_ranks(info: RunnerInfo, config: SchedulerConfig, num_slots: int) -> tuple[DataRankState, ...]:
    """The data-parallel ranks, with `num_slots` slots divided among them. Raises ConfigError."""
    ranks = info.data_ranks
    if num_slots < ranks:
        raise ConfigError(
            "too few slots for the data-parallel ranks",
            expected=f"max_slots of {ranks} or more",
            got=num_slots,
        )
    ids = itertools.count(1)  # of transfers
    homes = []
    for rank in range(ranks):
        first = rank * info.max_slots // ranks
        slots = range(first, first + num_slots // ranks + (rank < num_slots % ranks))
        kv = KVManager(
            info.kv,
            info.num_blocks,
            prefix_cache=config.prefix_cache,
            tiers=info.tiers,
            rank=rank,
            ids=ids,
        )
        homes.append(DataRankState(rank, slots, kv))
    return tuple(homes)
