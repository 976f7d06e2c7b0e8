"""Snapshots of recurrent states: at which positions they are taken, and when a prefix hit can use them.

A snapshot is pending from the first plan that names it until a committed row has passed its position; then
its state enters the prefix index. Its hash need not be known before, so a state can be kept while decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.contract.step import StateGroup, StateSnapshot
from pegainfer.kv.blocks import BlockPool
from pegainfer.kv.tables import PendingState, SequenceBlocks

PROMPT_SHARE = 4  # one row of a prompt keeps at most one in so many of a pool's states


class StateKeeper:
    """Allocates and publishes snapshots for one KVManager. Mutates pools and the sequences' pending lists."""

    def __init__(
        self, states: Sequence[tuple[int, StateGroup, BlockPool]], unit: int, stride: int, every: int
    ) -> None:
        """
        Args:
            states: (group number, group, pool) of each state group.
            unit: tokens that one hash covers.
            stride: positions that are multiples of it can be hit; a multiple of `unit`.
            every: multiples of it are kept in a prompt.
        """
        self._states = states
        self._unit = unit
        self.stride = stride
        self._every = every
        self._most = max(1, min((pool.num_blocks for _, _, pool in states), default=0) // PROMPT_SHARE)

    def of_prompt(
        self, seq: SequenceBlocks, slot: int, start: int, end: int, known: int, step: int
    ) -> list[StateSnapshot]:
        """Snapshots of a row over the known tokens [start, end): at equal steps and at the last boundary.

        The last boundary before `known` tokens serves whoever sends the same tokens and goes on differently.
        """
        first = start // self._every + 1
        positions = [i * self._every for i in range(first, end // self._every + 1)]
        last = (known - 1) // self.stride * self.stride
        if start < last <= end and last % self._every:
            positions.append(last)
        out: list[StateSnapshot] = []
        for position in sorted(positions)[-self._most :]:
            unit = position // self._unit
            key = seq.hashes[unit - 1] if unit <= len(seq.hashes) else None
            if key is None or any(pool.lookup(key) is None for _, _, pool in self._states):
                self._add(seq, slot, position, step, out, rolling=False)
        return out

    def of_decode(
        self, seq: SequenceBlocks, slot: int, start: int, end: int, step: int
    ) -> list[StateSnapshot]:
        """Snapshots of a row that computes at most [start, end), `start` being the highest that it can be.

        Boundaries that rows in flight need not have passed are named again: rows with drafts may be rejected,
        and a row that commits nothing has not passed its last position. Boundaries that only this row can be
        the first to pass are added.
        """
        out: list[StateSnapshot] = []
        passed = start  # highest position up to which every boundary is taken care of
        for pending in seq.pending:
            if pending.position <= end:
                pending.step = step
                self._name(pending, slot, out)
            passed = max(passed, pending.position)
        for position in range((passed // self.stride + 1) * self.stride, end + 1, self.stride):
            self._add(seq, slot, position, step, out, rolling=True)
        return out

    def _add(
        self,
        seq: SequenceBlocks,
        slot: int,
        position: int,
        step: int,
        out: list[StateSnapshot],
        *,
        rolling: bool,
    ) -> None:
        """A new pending snapshot; none where a pool has no state left."""
        if any(not pool.available for _, _, pool in self._states):
            return
        states = [(g, pool, pool.allocate()) for g, _, pool in self._states]
        pending = PendingState(position, states, step, rolling)
        seq.pending.append(pending)
        self._name(pending, slot, out)

    def _name(self, pending: PendingState, slot: int, out: list[StateSnapshot]) -> None:
        out += [StateSnapshot(slot, g, pending.position, state) for g, _, state in pending.states]

    def resolve(self, seq: SequenceBlocks, computed: int, *, publish: bool = True) -> None:
        """A committed row has brought `seq` to `computed` tokens: what it passed is found, if `publish`.

        Of the snapshots taken while decoding only the newest is worth its memory; older ones are dropped.
        """
        passed = [pending for pending in seq.pending if pending.position <= computed]
        seq.pending = [pending for pending in seq.pending if pending.position > computed]
        for pending in passed:
            key = seq.hashes[pending.position // self._unit - 1]
            if pending.rolling:
                for pool, state, old in seq.rolling:
                    pool.discard(state, old)
                seq.rolling = [(pool, state, key) for _, pool, state in pending.states]
            for _, pool, state in pending.states:
                if publish:
                    pool.publish(state, key, seq.owner)
                if not seq.released:
                    pool.release(state, after=pending.step)

    def release(self, seq: SequenceBlocks, after: int) -> None:
        """The sequence gives up its pending snapshots once step `after` is retired.

        Rows in flight may still pass them, and `resolve` then publishes them in time.
        """
        for pending in seq.pending:
            for _, pool, state in pending.states:
                pool.release(state, after=after)
