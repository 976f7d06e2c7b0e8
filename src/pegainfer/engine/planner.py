"""Fills a step's batches: rows for those that run, in order of rank, then admissions from the queue.

There is one batch for each data-parallel rank, with a token budget of its own. A running sequence stays on
its rank; one that waits is placed when it is admitted (`_place`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from pegainfer.contract.step import RunnerInfo
from pegainfer.engine.batch import Batch
from pegainfer.engine.cost import StepCost
from pegainfer.engine.residents import Residents
from pegainfer.engine.sequence import Sequence, Status

# Short steps' worth of waiting tokens from which on steps are long: the queue then costs more than it saves.
BACKLOG = 16
# Of the latency target, what prefill gets even where decoding alone takes all of it: who waits must come on.
LEAST_SHARE = 0.25


class Planner:
    """Decides who computes what in a step. Mutates sequences, residents and the batch."""

    def __init__(
        self, residents: Residents, info: RunnerInfo, cost: StepCost, target_seconds: float | None
    ) -> None:
        """`target_seconds`: that a step with decode rows should take at most."""
        self._residents = residents
        self._cost = cost
        self._fill_tokens = info.fill_tokens
        self._target_seconds = target_seconds
        self._unit = residents.unit
        self._displaced_until = 0  # step after which what was last displaced is free
        # For whom it was displaced, and on which data-parallel rank.
        self._displaced: tuple[Sequence, int] | None = None

    def fill(self, batches: Seq[Batch]) -> None:
        """Places rows; batches without rows mean that nothing can be done before the next commit."""
        for batch in batches:
            self._run(batch, batches)
        self._admit(batches)

    # Those that run

    def _run(self, batch: Batch, batches: Seq[Batch]) -> None:
        """Walks a rank's running sequences in order; admits waiting ones that outrank the next."""
        running, waiting = batch.home.running.items, self._residents.waiting.items
        step, drafts, states = batch.step, batch.drafts, batch.home.kv.states
        urgent = bool(waiting and running) and waiting[0].rank < running[-1].rank
        i = 0
        while i < len(running):  # preemption shortens the list behind i
            seq = running[i]
            if urgent and waiting and waiting[0].rank < seq.rank:
                self._count_decodes(i, batch)
                urgent = self._admit_urgent(batch, batches)
                continue
            i += 1
            if seq.last_step == step:
                continue  # it was admitted or forked a moment ago
            known = len(seq.tokens)
            follow = seq.uncommitted > 0
            # With a sampling row in flight the position is the highest that it can turn out to be.
            start = known - 1 + seq.uncommitted if follow else seq.planned
            if follow or known - start == 1:
                if batch.later_decodes:
                    batch.later_decodes -= 1
                    batch.context -= known
                if start + 1 >= seq.limit or batch.left <= 0:
                    continue  # at the limit, the next commit tells whether it has ended
                kv = seq.kv
                assert kv is not None
                # A mask is made for one token, so a row with a grammar has no drafts.
                end = start + 1 + drafts
                if drafts:
                    end = max(start + 1, min(end, seq.limit - 1)) if seq.matcher is None else start + 1
                if end > kv.capacity:
                    covered = self._residents.cover(seq, start + 1, end, batch)
                    if not covered:
                        continue
                    end = min(end, covered)
                if drafts:
                    end = min(end, start + batch.left)
                batch.place_decode(seq, start, follow, end - start - 1)
                if states is not None and (kv.pending or end // states.stride > start // states.stride):
                    batch.snapshots += states.of_decode(kv, seq.slot, start, end, step)
                if seq.children:
                    self._count_decodes(i, batch)
                    self._fork(seq, batch)
                continue
            self._count_decodes(i, batch)
            affordable = self._affordable(batch, seq.planned)
            room = batch.prefill_room
            if room <= 0 and i == 1:
                room = min(1, batch.left)  # the best-ranked always progresses
            room = min(room, affordable)
            if room > 0:
                self._prefill(seq, room, batch)
        batch.later_decodes = batch.context = 0

    def _count_decodes(self, first: int, batch: Batch) -> None:
        """Counts, once a step, the running sequences from index `first` on that will ask for one token."""
        if not batch.counted:
            batch.counted = True
            later = batch.home.running.items[first:]
            known = [len(s.tokens) for s in later if s.uncommitted > 0 or len(s.tokens) - s.planned == 1]
            batch.later_decodes, batch.context = len(known), sum(known)

    def _affordable(self, batch: Batch, start: int) -> int:
        """Tokens after position `start` that fit into the latency target beside the step's decode rows.

        The first chunk of a step is never shorter than a block, so that each step brings somebody on. Also
        bounds what the step takes in all, once.
        """
        if not batch.priced:
            batch.priced = True
            rows = len(batch.decodes) + batch.later_decodes
            if self._fill_tokens:
                batch.prefill_left = min(batch.prefill_left, max(self._fill(rows) - rows, self._unit))
            if rows and self._target_seconds is not None:
                decoding = self._cost.decodes(rows, batch.placed_context() + batch.context)
                least = LEAST_SHARE * self._target_seconds
                batch.seconds_left = max(self._target_seconds - decoding, least)
        if batch.seconds_left == math.inf:
            return batch.left
        tokens = self._cost.tokens_within(batch.seconds_left, start)
        if tokens is None:
            return batch.left
        if not batch.prefills:
            return max(tokens, self._unit)
        if not tokens:
            batch.prefill_left = 0
        return tokens

    def _fill(self, rows: int) -> int:
        """Tokens that a step with these decode rows and a prompt is filled up to."""
        short, long = self._fill_tokens[0], self._fill_tokens[-1]
        return short if rows and self._residents.waiting.num_tokens <= BACKLOG * short else long

    def _prefill(self, seq: Sequence, room: int, batch: Batch) -> None:
        """A chunk of a running sequence, as large as room and blocks allow."""
        kv = seq.kv
        assert kv is not None
        start, target = seq.planned, seq.target
        if start >= target:
            return
        end = min(target, start + room)
        covered = kv.capacity
        if end > covered:
            covered = self._residents.cover(seq, start + 1, end, batch)
        if covered > start:
            self._place_chunk(seq, start, min(end, covered), batch)

    def _place_chunk(self, seq: Sequence, start: int, end: int, batch: Batch) -> None:
        sample = end == len(seq.tokens)
        batch.place_prefill(seq, start, end - start, sample)
        if batch.seconds_left < math.inf:
            batch.seconds_left -= self._cost.prefill(start, end - start)
        states = batch.home.kv.states
        if states is not None and seq.kv is not None:
            known = len(seq.tokens)
            batch.snapshots += states.of_prompt(seq.kv, seq.slot, start, end, known, batch.step)

    def _fork(self, parent: Sequence, batch: Batch) -> None:
        """The parent computes its last prompt token; its children enter with all before it computed.

        Those without room queue like any other sequence, and find the prompt in the prefix cache.
        """
        children, parent.children = parent.children, []
        last = parent.num_prompt - 1
        for child in children:
            child.num_cached = parent.num_cached
            if (
                batch.prefill_room > 0
                and not batch.hungry
                and self._residents.adopt(child, parent, parent.num_prompt, batch)
            ):
                batch.place_prefill(child, last, 1, True)
            else:
                child.status = Status.WAITING
                self._residents.waiting.add(child)

    # Those that wait

    def _admit(self, batches: Seq[Batch]) -> None:
        """Takes from the queue, in its order, until somebody does not fit."""
        waiting = self._residents.waiting
        while waiting.items and any(map(self._takes, batches)):
            seq = waiting.first()
            # A preempted sequence re-enters when its last tokens are known.
            if seq.flying:
                return
            if not self._residents.claim_adapter(seq):
                continue
            batch = self._place(seq, batches)
            if not self._takes(batch) or not self._enter(seq, batch):
                return

    def _takes(self, batch: Batch) -> bool:
        """Whether a rank can take in anybody now."""
        return not batch.hungry and batch.prefill_room > 0 and bool(batch.home.free_slots)

    def _place(self, seq: Sequence, batches: Seq[Batch]) -> Batch:
        """The data-parallel rank where a waiting sequence should run.

        Of the ranks where it fits now, the one that has most of its prefix, then the one with the fewest
        sequences, then the one whose cache has most room left. If it fits nowhere, the one where room was
        made for it, else an empty one, else the one whose worst-ranked sequence it would displace.
        """
        if len(batches) == 1:
            return batches[0]
        best: tuple[tuple[int, int, int], Batch] | None = None
        for batch in batches:
            home = batch.home
            if self._takes(batch) and not home.is_blocked(seq):
                num_tokens = seq.target if seq.may_use_prefix else 0
                hit = home.kv.find(seq.hashes, num_tokens)
                if home.running.items and not home.kv.fits(hit, seq.target, 1, self._residents.watermark):
                    continue
                cached = home.kv.cached_tokens(seq.hashes, num_tokens, hit)
                key = (cached, -len(home.running), home.kv.pools[0].num_free)
                if best is None or key > best[0]:
                    best = key, batch
        if best is not None:
            return best[1]
        if self._displaced is not None and self._displaced[0] is seq:
            return batches[self._displaced[1]]
        last = (math.inf, 0)
        return max(batches, key=lambda b: b.home.running.items[-1].rank if b.home.running.items else last)

    def _admit_urgent(self, batch: Batch, batches: Seq[Batch]) -> bool:
        """Admits the first in the queue, which outranks one that runs; that one is preempted if need be.

        False if it must wait for a plan in flight, or for the budget, or belongs to another rank.
        """
        residents = self._residents
        running, free_slots = batch.home.running.items, batch.home.free_slots
        seq = residents.waiting.items[0]
        if seq.flying or batch.hungry or batch.prefill_room <= 0:
            return False
        if not residents.waiting.outranks(seq, running[-1]):
            return False
        if not residents.claim_adapter(seq):
            return True  # it waits beside the queue
        if self._place(seq, batches) is not batch:
            return False
        if free_slots and self._enter(seq, batch):
            return True
        victim = running[-1]
        if victim.rank < seq.rank or not residents.is_retired(self._displaced_until):
            return False
        residents.preempt(victim)
        self._displaced_until = victim.last_step
        self._displaced = (seq, batch.home.number)
        return not victim.flying

    def _enter(self, seq: Sequence, batch: Batch) -> bool:
        """Admits `seq` with its first chunk if its known tokens fit on the rank; alone, with what does fit.

        Where a lower tier has more of its prefix, that is loaded first. False if it stays in the queue.
        """
        residents, home = self._residents, batch.home
        kv = home.kv
        alone = not home.running.items
        if not alone and home.is_blocked(seq):
            return False
        target = seq.target
        hit = kv.find(seq.hashes, target if seq.may_use_prefix else 0)
        if residents.tiering.load(seq, hit, residents.watermark, batch):
            return True
        start = hit.num_tokens
        affordable = self._affordable(batch, start)
        room = min(batch.prefill_room, affordable)
        if room <= 0:
            return False
        end = min(target, start + room)
        if not kv.fits(hit, target, end - start, residents.watermark):
            if not alone:
                home.blocked = (seq, kv.num_available())
                return False
            if kv.reach(hit, residents.no_spare) <= start:
                hit = kv.find((), 0)  # the hit itself leaves no room to go on
                start = 0
                end = min(target, room)
            end = min(end, kv.reach(hit, residents.no_spare))
            if end <= start:
                return False
        home.blocked = None
        if self._displaced is not None and self._displaced[0] is seq:
            self._displaced = None
        residents.enter(seq, hit, end, batch)
        if not seq.entered:
            if not seq.index:  # the others find what the first one has computed, which was not cached before
                seq.num_cached = start
            if residents.tenants.contended:
                seq.tenant.service += target - start
        self._place_chunk(seq, start, end, batch)
        return True
