"""A runner without a device: the whole engine runs on it in tests, in milliseconds.

It obeys plans to the letter, keeps its own model of slots, tables and block contents, and raises
InvariantError where a plan contradicts it. Tokens come from `null_model`.
"""

from __future__ import annotations

import random
import struct
import time

from pegainfer.contract.adapter import AdapterInfo
from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import unpack_tokens
from pegainfer.contract.step import Row, RunnerInfo, StepPlan, StepResult
from pegainfer.contract.tiers import DEVICE
from pegainfer.null.adapters import NullAdapters
from pegainfer.null.config import NullConfig
from pegainfer.null.memory import NOBODY, NullMemory, NullSlot, Uses
from pegainfer.null.model import chain_start, hidden_state
from pegainfer.null.pending import NullPending, NullStep
from pegainfer.null.transfers import NullTransfers


class NullRunner:
    """Implements contract.step.Runner."""

    def __init__(self, config: NullConfig | None = None) -> None:
        self.config = c = config or NullConfig()
        self._info = c.runner_info()
        self.slots: dict[int, NullSlot] = {}
        self.adapters = NullAdapters(c.max_adapters)
        self.closed = False
        self.num_rows = 0
        self._memory = NullMemory(c.kv, c.num_blocks)
        self._transfers = NullTransfers(
            c.tiers,
            c.num_blocks,
            most_steps=c.transfer_steps,
            failures=c.failed_transfers,
            seed=c.seed + (c.rank << 64),
        )
        self._memory.moving = self._transfers.moving
        self._rng = random.Random(c.seed)
        self._in_flight: list[NullStep] = []
        self._unsampled: NullStep | None = None
        self._step: int | None = None
        self._last_rows: tuple[Row, ...] = ()  # of the plan before
        self._busy_until = 0.0

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def forward(self, plan: StepPlan) -> NullStep:
        """Applies the plan and computes its rows. Raises InvariantError where the plan is wrong."""
        if self._unsampled is not None:
            raise InvariantError("forward before the sampling of the plan before")
        if self._step is not None and plan.step != self._step + 1:
            raise InvariantError(f"step {plan.step} follows step {self._step}")
        if plan.num_tokens > self._info.max_tokens:
            raise InvariantError(f"a plan of {plan.num_tokens} tokens, at most {self._info.max_tokens}")
        if len(self._in_flight) > 1:
            raise InvariantError("more than two plans are uncommitted")
        self._check_repeats(plan)
        self._step = plan.step
        step = NullStep(plan)
        in_flight = [other.uses for other in self._in_flight]
        self._apply(plan, step, in_flight)
        seen: set[int] = set()
        for row in plan.rows:
            if row.slot in seen:
                raise InvariantError(f"two rows of slot {row.slot} in step {plan.step}")
            seen.add(row.slot)
            step.starts.append(self._compute(row, step, in_flight))
        self.num_rows += len(plan.rows)
        self._in_flight.append(step)
        self._unsampled = step
        return step

    def _check_repeats(self, plan: StepPlan) -> None:
        before, self._last_rows = self._last_rows, plan.rows
        if plan.repeats:
            rows = [(row.slot, row.drafts) for row in plan.rows]
            decodes = all([row.sample and row.count == 1 for row in before])
            if not rows or not decodes or rows != [(row.slot, row.drafts) for row in before]:
                raise InvariantError(f"step {plan.step} does not repeat the rows of the step before")

    def _apply(self, plan: StepPlan, step: NullStep, in_flight: list[Uses]) -> None:
        for free in plan.frees:
            if free not in self.slots:
                raise InvariantError(f"slot {free} is freed but empty")
            if any(row.slot == free for other in self._in_flight for row in other.plan.rows):
                raise InvariantError(f"slot {free} is freed while a plan in flight has a row of it")
            self._memory.detach(self.slots.pop(free))
        for new in plan.news:
            if new.slot in self.slots or not 0 <= new.slot < self._info.max_slots:
                raise InvariantError(f"slot {new.slot} is taken or does not exist")
            start = chain_start(self.adapters.digest(new.adapter))
            self.slots[new.slot] = NullSlot(new, unpack_tokens(new.tokens), len(self._info.kv.groups), start)
        owners: dict[tuple[int, int], int] = {}  # (group, block) -> the sequence that got it in this plan
        for part in plan.blocks:
            slot = self.slots[part.slot]
            self._memory.attach(slot, part.group, part.blocks)
            owners.update(((part.group, block), slot.seq) for block in part.blocks)
        for copy in plan.copies:
            self._memory.copy(copy, owners.get((copy.group, copy.dst), NOBODY), step.uses, in_flight)
        if plan.reset_tiers:
            self._transfers.reset()
        for t in plan.transfers:
            if t.target_pool == DEVICE:
                self._memory.expect(t.group, t.target, in_flight)
            on_device = t.source_pool == DEVICE
            self._transfers.start(t, self._memory.content(t.group, t.source) if on_device else None)
        if plan.wait_transfers and plan.rows:
            raise InvariantError(f"step {plan.step} waits for transfers, but has rows")

    def _compute(self, row: Row, step: NullStep, in_flight: list[Uses]) -> int:
        """Reads what the row needs, writes what it computes; returns where it really started."""
        slot = self.slots[row.slot]
        known = len(slot.tokens)
        sampled_before = any([row.slot in other.sampled for other in self._in_flight])
        if row.follow != sampled_before:
            raise InvariantError(
                f"slot {row.slot}: follow is {row.follow}, a sampling row in flight {sampled_before}"
            )
        start, end, drafts = row.start, row.start + row.count, row.drafts
        if end + drafts > min(self._memory.reach(slot), self._info.max_model_len):
            raise InvariantError(f"slot {row.slot}: {row} goes beyond the slot's tables or the context")
        if drafts and (not row.sample or not 0 < drafts < self._info.max_commit):
            raise InvariantError(f"slot {row.slot}: {row} has too many drafts")
        if row.follow:
            if row.count != 1 or not row.sample or start < known - 1:
                raise InvariantError(f"slot {row.slot}: {row} cannot follow {known} tokens")
            start, end = known - 1, known
        elif slot.next is not None and start != slot.next:
            raise InvariantError(f"slot {row.slot}: row starts at {start}, expected {slot.next}")
        if row.count < 1 or (end != known if row.sample else end >= known):
            raise InvariantError(f"slot {row.slot}: {row} does not fit {known} known tokens")
        self._memory.read(slot, start, step.uses)
        self._memory.write(slot, start, slot.chains[start:end], step.uses, in_flight)
        if row.sample:
            step.sampled.add(row.slot)
        else:
            slot.next = end
            self._memory.write_state(slot, end, in_flight)
        return start

    def sample(self, handle: NullStep, masks: dict[int, bytes] | None = None) -> NullPending:
        """Draws the tokens of all sampling rows, then keeps the plan's snapshots."""
        if handle is not self._unsampled:
            raise InvariantError("sample without a forward before it")
        self._unsampled = None
        plan = handle.plan
        fault = self.config.faults(plan) if self.config.faults is not None else None
        errors = fault if isinstance(fault, dict) else {}
        in_flight = [other.uses for other in self._in_flight if other is not handle]
        tokens: list[tuple[int, ...]] = []
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        pooled: dict[int, bytes] = {}
        for i, row in enumerate(plan.rows):
            slot = self.slots[row.slot]
            start = handle.starts[i]
            if slot.sampling.prompt_logprobs is not None and start + 1 < slot.num_prompt:
                prompt_logprobs[i] = self._prompt_logprobs(slot, start + 1, start + row.count)
            known = len(slot.tokens)
            if slot.sampling.pooling is not None and row.sample and known == slot.num_prompt:
                pooled[i] = self._pooled(slot)
            mask = masks.get(i) if masks else None
            drawn = self._draw(slot, row.drafts, handle, in_flight, mask) if row.sample else ()
            if drawn and slot.sampling.logprobs is not None:
                logprobs[i] = tuple(
                    self.config.model.logprob(t, slot.chain_at(known + j), slot.sampling.logprobs)
                    for j, t in enumerate(drawn)
                )
            tokens.append(() if i in errors else drawn)
        self._keep_snapshots(handle, in_flight)
        seconds = self.config.step_seconds + self.config.token_seconds * plan.num_tokens
        if not self.config.virtual:
            self._busy_until = max(self._busy_until, time.monotonic()) + seconds
        if isinstance(fault, Exception):
            return NullPending(self.settle, handle, fault, self._busy_until)
        landed, failed = self._end_transfers(plan)
        result = StepResult(
            step=plan.step,
            tokens=tuple(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            errors=errors,
            seconds=seconds,
            landed=landed,
            failed=failed,
        )
        return NullPending(self.settle, handle, result, self._busy_until)

    def _end_transfers(self, plan: StepPlan) -> tuple[tuple[int, ...], dict[int, str]]:
        """Ids of transfers that end with this plan's result: landed, and failed with the reason."""
        if not self._transfers:
            return (), {}
        landed, failed = self._transfers.end_some(at_least_one=plan.wait_transfers)
        for t, content in landed:
            if t.target_pool == DEVICE:
                self._memory.land(t.group, t.target, content)
        return tuple(t.id for t, _ in landed), {t.id: "the null device was told to fail" for t in failed}

    def _keep_snapshots(self, step: NullStep, in_flight: list[Uses]) -> None:
        """Writes each snapshot whose position its row has passed with tokens that stay."""
        if not step.plan.snapshots:
            return
        places = {row.slot: i for i, row in enumerate(step.plan.rows)}
        for wanted in step.plan.snapshots:
            i = places.get(wanted.slot)
            if i is None:
                raise InvariantError(f"{wanted} has no row in step {step.plan.step}")
            row = step.plan.rows[i]
            if not 0 < wanted.position <= row.start + row.count + row.drafts:
                raise InvariantError(f"{wanted} lies outside of {row}")
            slot = self.slots[wanted.slot]
            end = len(slot.tokens) - 1 if row.sample else row.start + row.count
            if step.starts[i] < wanted.position <= end:
                self._memory.snapshot(slot, wanted, step.uses, in_flight)

    def _draw(
        self, slot: NullSlot, drafts: int, step: NullStep, in_flight: list[Uses], mask: bytes | None
    ) -> tuple[int, ...]:
        """0..drafts + 1 tokens; rejected drafts leave junk in the pages, and the states roll back."""
        last = len(slot.tokens) - 1
        if mask is not None and drafts:
            raise InvariantError(f"sequence {slot.seq}: a row with a mask has {drafts} drafts")
        commits = 0 if self._rng.random() < self.config.zero_commits else self._rng.randint(1, drafts + 1)
        for _ in range(commits):
            token = self.config.model.draw(
                slot.tokens,
                slot.chains[-1],
                slot.num_prompt,
                slot.sampling,
                slot.seed,
                slot.mask_tokens,
                mask,
            )
            slot.append(token)
        if drafts:
            junk = [step.plan.step] * (drafts + 1 - max(1, commits))
            accepted = slot.chains[last + 1 : last + commits]
            self._memory.write(slot, last + 1, accepted + junk, step.uses, in_flight)
        slot.next = len(slot.tokens) - 1
        self._memory.write_state(slot, slot.next, in_flight)
        return tuple(slot.tokens[last + 1 :])

    def _prompt_logprobs(self, slot: NullSlot, first: int, last: int) -> tuple[TokenLogprob, ...]:
        top = slot.sampling.prompt_logprobs or 0
        positions = range(first, min(last, slot.num_prompt - 1) + 1)
        return tuple(self.config.model.logprob(slot.tokens[p], slot.chain_at(p), top) for p in positions)

    def _pooled(self, slot: NullSlot) -> bytes:
        """float32 LE: the mean of the prompt's hidden states, or the last one."""
        first = 1 if slot.sampling.pooling == "mean" else slot.num_prompt
        states = [hidden_state(slot.chain_at(p)) for p in range(first, slot.num_prompt + 1)]
        mean = [sum(column) / len(states) for column in zip(*states, strict=True)]
        return struct.pack(f"<{len(mean)}f", *mean)

    def read_adapter(self, name: str, path: str) -> tuple[AdapterInfo, bytes]:
        return self.adapters.read(name, path)

    def install_adapter(self, index: int, adapter: bytes) -> None:
        self.adapters.install(index, adapter)

    def remove_adapter(self, index: int) -> None:
        rows = [row.slot for step in self._in_flight for row in step.plan.rows]
        if any(slot in self.slots and self.slots[slot].adapter == index for slot in rows):
            raise InvariantError(f"adapter {index} is removed while a plan in flight uses it")
        self.adapters.remove(index)

    def settle(self, step: NullStep) -> None:
        """The step's result was taken: what it used may be used again."""
        if step in self._in_flight:
            self._in_flight.remove(step)

    def close(self) -> None:
        self.closed = True
