"""State of every slot between steps: token history, block tables, sampling parameters.

Arrays are allocated once and a plan's deltas are written in place. Memory that no sequence has reached is
never touched, so that a large max_model_len costs nothing until it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.contract.adapter import NO_ADAPTER
from pegainfer.contract.errors import InvariantError, UnsupportedError
from pegainfer.contract.step import NO_BLOCK, KVSpec, NewSlot, PageGroup, RunnerInfo, SlotBlocks, StepPlan
from pegainfer.contract.tiers import DEVICE
from pegainfer.runner.sampling_state import SamplingState

Array = np.ndarray[Any, Any]


def table_widths(kv: KVSpec, max_model_len: int) -> list[int]:
    """Entries of a sequence's table in each group: its blocks, or its one state."""
    return [-(-max_model_len // g.block_size) if isinstance(g, PageGroup) else 1 for g in kv.groups]


class Slots:
    """What plans refer to by slot number. Mutated by `apply` and `advance`; not thread-safe.

    Z slots, X history's width; history: [Z, X] int32; known, num_prompt: [Z] int64; adapters: [Z] int32, the
    index of each slot's adapter or -1; tables: for each group [Z, W] int32, where W is 1 for a state group,
    whose one entry is the slot's state.
    """

    def __init__(self, info: RunnerInfo, max_logprobs: int) -> None:
        """Raises UnsupportedError for a part of the contract that device runners do not have yet."""
        self._refuse("rows that commit several tokens (max_commit)", info.max_commit > 1)
        self._refuse("data-parallel ranks (data_ranks)", info.data_ranks > 1)
        slots, length = info.max_slots, info.max_model_len
        self.vocab_size = info.vocab_size
        self.pool_blocks = info.num_blocks
        self._paged = tuple(isinstance(g, PageGroup) for g in info.kv.groups)
        self._windows = {g for g, p in enumerate(info.kv.groups) if isinstance(p, PageGroup) and p.window}
        # One more than max_model_len: the last token drawn is known but never computed.
        self.history = np.zeros((slots, length + 1), np.int32)
        self.known = np.zeros(slots, np.int64)
        self.adapters = np.full(slots, NO_ADAPTER, np.int32)
        self.max_adapters = info.max_adapters
        self.num_prompt = np.zeros(slots, np.int64)
        widths = table_widths(info.kv, length)
        self.tables = tuple(np.zeros((slots, width), np.int32) for width in widths)
        self.num_blocks = np.zeros((len(widths), slots), np.int64)
        self.sampling = SamplingState(slots, info.vocab_size, max_logprobs)
        self._taken = [False] * slots

    def apply(self, plan: StepPlan) -> None:
        """Frees, new slots, appended blocks, in this order. Raises InvariantError for an impossible plan."""
        for slot in plan.frees:
            if not self._taken[slot]:
                raise InvariantError(f"step {plan.step} frees slot {slot}, which is empty")
            self._taken[slot] = False
            self.sampling.leave(slot)
        for new in plan.news:
            self._enter(plan.step, new)
        for change in plan.blocks:
            self._extend(plan.step, change)
        for copy in plan.copies:
            self._check_blocks(plan.step, copy.group, (copy.src, copy.dst))
        for t in plan.transfers:
            ends = ((t.source_pool, t.source), (t.target_pool, t.target))
            self._check_blocks(plan.step, t.group, tuple(block for pool, block in ends if pool == DEVICE))
        for snapshot in plan.snapshots:
            self._check_blocks(plan.step, snapshot.group, (snapshot.state,))

    def advance(self, slots: Array, tokens: int = 1) -> None:
        """Counts drawn tokens, already in the history, for each of these distinct slots: [n] integers."""
        self.known[slots] += tokens

    def have_adapters(self, slots: Array) -> bool:
        """Whether one of these slots has an adapter."""
        return self.max_adapters > 0 and bool((self.adapters[slots] != NO_ADAPTER).any())

    @staticmethod
    def _refuse(feature: str, wanted: bool) -> None:
        if wanted:
            raise UnsupportedError(f"this device's runner does not support {feature}")

    def _enter(self, step: int, new: NewSlot) -> None:
        if not NO_ADAPTER <= new.adapter < self.max_adapters:
            raise InvariantError(
                f"step {step}: sequence {new.seq} has adapter {new.adapter} of {self.max_adapters}"
            )
        if self._taken[new.slot]:
            raise InvariantError(f"step {step} puts sequence {new.seq} into slot {new.slot}, which is taken")
        tokens = np.frombuffer(new.tokens, "<i4")
        if not 0 < new.num_prompt <= len(tokens) < self.history.shape[1]:
            raise InvariantError(
                f"step {step}: sequence {new.seq} has {len(tokens)} tokens, {new.num_prompt} of them prompt"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise InvariantError(f"step {step}: sequence {new.seq} has token ids outside the vocabulary")
        self._taken[new.slot] = True
        self.history[new.slot, : len(tokens)] = tokens
        self.known[new.slot] = len(tokens)
        self.adapters[new.slot] = new.adapter
        self.num_prompt[new.slot] = new.num_prompt
        self.num_blocks[:, new.slot] = 0
        self.sampling.enter(new)

    def _extend(self, step: int, change: SlotBlocks) -> None:
        table = self.tables[change.group]
        start = int(self.num_blocks[change.group, change.slot]) if self._paged[change.group] else 0
        stop = start + len(change.blocks)
        if stop > table.shape[1]:
            raise InvariantError(f"step {step}: slot {change.slot} gets {stop} blocks of {table.shape[1]}")
        blocks = change.blocks
        if change.group in self._windows:
            blocks = tuple(b for b in blocks if b != NO_BLOCK)
        self._check_blocks(step, change.group, blocks)
        table[change.slot, start:stop] = change.blocks
        self.num_blocks[change.group, change.slot] = stop

    def _check_blocks(self, step: int, group: int, blocks: tuple[int, ...]) -> None:
        """Kernels and copies do not check ids: one outside the pool would reach memory of another owner."""
        count = self.pool_blocks[group]
        if blocks and not (min(blocks) >= 0 and max(blocks) < count):
            raise InvariantError(
                f"step {step} names blocks {min(blocks)} … {max(blocks)} of group {group}, which has {count}"
            )
