"""The Runner on a host device: plans in, tokens out, in order, on a thread of its own.

A runner on a device with memory of its own differs in three things only. It shares the slots, the staging
and `runner/sampling.py` with this one; none of them runs a program or waits.

- **Ids come back late.** Executors put work on a stream and return at once; the sampler's `tokens`, `status`
  and asked-for logprobs go to pinned memory by an asynchronous copy, and the pending step waits for that
  copy's event. `Slots.advance` counts every sampling row at submission, since no host knows yet whether a
  draw failed; a row whose draw failed computes one wasted token, which its sequence's end discards.
- **A token that the host has not seen.** The sampler appends to `history`, which is device state. The token
  ids of following rows are read from there: `token_ids` is an input of its own, so such a runner binds it to
  device memory and fills it there. All other inputs follow from counts that the host knows.
- **Sizes.** A step is padded to the bucket of a captured graph. Padding writes nowhere (its places and states
  are -1) and its outputs are not read, so plans, staging and results do not see it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.step import RunnerInfo, StepPlan, StepResult
from pegainfer.kv.device.layout import GroupLayout
from pegainfer.kv.device.pool import HostPools
from pegainfer.kv.layout import group_bytes
from pegainfer.ops.backend import Backend, Executor
from pegainfer.ops.expert_counts import choices_of
from pegainfer.ops.program import Program
from pegainfer.ops.tensor import Kind
from pegainfer.runner.expert_counts import ExpertCounts
from pegainfer.runner.pooling import Pools, hidden_parts, whole_prompts
from pegainfer.runner.program import largest_step
from pegainfer.runner.sampling import (
    SamplerCalls,
    check_sampled_in_time,
    gathered_logprobs,
    prompt_parts,
    step_result,
)
from pegainfer.runner.serves_adapters import ServesAdapters
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import StagedRows, Staging
from pegainfer.runtime.priority import at_usual_priority
from pegainfer.runtime.worker import Task, Worker

if TYPE_CHECKING:
    from pegainfer.kv.device.store import BlockStore
    from pegainfer.kv.device.transfers import Transfers
    from pegainfer.runner.adapters import HostAdapters

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)


@runtime_checkable
class CountsClipped(Protocol):
    """An executor that counts the keys and values which an 8-bit KV cache clips."""

    @property
    def clipped(self) -> int: ...


class Programs(msgspec.Struct, frozen=True):
    """What a step runs.

    Args:
        forward: from step inputs to `x` [T, M] and `logits` [L, V]; writes the parts of the KV groups.
        sampler, prompt_logprobs, hidden_states: see ops/sampler.py.
    """

    forward: Executor
    sampler: Executor
    prompt_logprobs: Executor
    hidden_states: Executor


class _Step(msgspec.Struct, frozen=True):
    """A forward pass that has run and waits for its sampling."""

    plan: StepPlan
    rows: StagedRows
    outputs: Mapping[str, Array]
    seconds: float
    stage_seconds: float  # of them, making the inputs


class HostRunner(ServesAdapters):
    """Implements contract.step.Runner and AdapterRunner.

    `forward` and `sample` only queue their work; the worker applies deltas, computes and draws in the order
    of the calls, so that a row that follows an uncommitted one finds its token in the history. A step is
    sampled before the next one's forward is queued: both write the same output arrays.
    """

    def __init__(
        self,
        info: RunnerInfo,
        slots: Slots,
        pools: HostPools,
        programs: Programs,
        staging: Staging,
        backend: Backend,
        adapters: HostAdapters | None = None,
        experts: ExpertCounts | None = None,
    ) -> None:
        """Takes over all of them; `backend` is closed with the runner."""
        self._info = info
        self._backend = backend
        self._slots = slots
        self._kv = pools
        self._programs = programs
        self._staging = staging
        self._adapters = adapters
        self._experts = experts
        self._sampler_calls = SamplerCalls(slots)
        self._clipped = False  # whether the warning about clipped keys or values was logged
        self._last_forward = 0  # the step whose outputs the arrays hold; the worker's
        self._pools = Pools()
        self._transfers: Transfers | None = None
        self._worker = Worker("runner")

    @classmethod
    def build(
        cls,
        programs: Mapping[str, Program],
        info: RunnerInfo,
        groups: Sequence[GroupLayout],
        backend: Backend,
        *,
        max_logprobs: int,
        adapters: HostAdapters | None = None,
    ) -> HostRunner:
        """A runner with memory for all KV groups; `backend` holds the programs' constants.

        Args:
            programs: by the fields of Programs.
            groups: those that `info` and the forward program were made from.
            max_logprobs: as the programs were made for.
            adapters: made from the forward program, where `info` has adapters.

        Raises ConfigError where memory for the KV cache cannot be had.
        """
        slots = Slots(info, max_logprobs)
        pools = HostPools(groups, info.num_blocks)
        states = {**pools.states, "history": slots.history, **(adapters.states if adapters else {})}
        largest = largest_step(info)
        ready = {name: backend.prepare(program, states, largest) for name, program in programs.items()}
        inputs = {t.name for t in programs["forward"].tensors(Kind.INPUT)}
        experts = ExpertCounts(choices_of(programs["forward"])) if info.counts_experts else None
        staging = Staging(slots, info, inputs)
        return cls(info, slots, pools, Programs(**ready), staging, backend, adapters, experts)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def use_tiers(self, stores: Sequence[BlockStore], free: Callable[[], None] | None = None) -> None:
        """Takes over the stores of `info.tiers`, before the first step. `free`: see Transfers."""
        from pegainfer.kv.device.transfers import Transfers

        args = (self._kv, self._info.tiers, stores, group_bytes(self._info.kv), free)
        self._transfers = at_usual_priority(lambda: Transfers(*args))  # it starts threads

    def forward(self, plan: StepPlan) -> Task[_Step]:
        return self._worker.submit(partial(self._forward, plan))

    def sample(self, handle: Task[_Step], masks: dict[int, bytes] | None = None) -> Task[StepResult]:
        return self._worker.submit(partial(self._sample, handle, masks or {}))

    def expert_tokens(self) -> ExpertTokens | None:
        """See CountingRunner."""
        return None if self._experts is None else self._experts.tokens()

    def close(self) -> None:
        """Returns when every queued step has ended."""
        self._worker.close()
        if self._transfers is not None:
            self._transfers.close()
        self._backend.close()

    # What follows runs on the worker's thread.

    def _forward(self, plan: StepPlan) -> _Step:
        started = time.perf_counter()
        self._slots.apply(plan)
        self._kv.copy(plan.copies)
        self._start_transfers(plan)
        rows = self._staging.rows(plan)
        inputs = self._staging.inputs(rows)
        staged = time.perf_counter()
        outputs = self._programs.forward.run(inputs, rows.env) if plan.rows else {}
        if self._experts is not None and plan.rows:
            self._experts.add(outputs)
        self._warn_of_clipping()
        self._last_forward = plan.step
        return _Step(plan, rows, outputs, time.perf_counter() - started, staged - started)

    def _warn_of_clipping(self) -> None:
        forward = self._programs.forward
        if not self._clipped and isinstance(forward, CountsClipped) and forward.clipped:
            self._clipped = True
            log.warning(
                "the fp8 KV cache clips keys or values of this model, which changes its answers: %d are"
                " past 448 times their scale so far; choose another --kv-cache-dtype", forward.clipped,
            )  # fmt: skip

    def _sample(self, handle: Task[_Step], masks: dict[int, bytes]) -> StepResult:
        step = handle.wait()  # it has ended: the worker runs in order; raises what the forward pass raised
        started = time.perf_counter()
        check_sampled_in_time(step.plan.step, self._last_forward)
        prompt_logprobs = self._prompt_logprobs(step)
        pooled = self._pooled(step) if self._slots.sampling.pooled else None
        drawn = self._draw(step, masks) if len(step.rows.sampling) else None
        seconds = step.seconds + time.perf_counter() - started
        result = step_result(
            step.plan, step.rows, drawn, prompt_logprobs, seconds, step.stage_seconds, pooled
        )
        return result if self._transfers is None else self._transfers.add_ended(step.plan, result)

    def _start_transfers(self, plan: StepPlan) -> None:
        """The steps before have ended, so what the plan's transfers read is complete."""
        if self._transfers is not None:
            self._transfers.begin(plan)
        elif plan.transfers:
            raise InvariantError(f"step {plan.step} has transfers, but the runner has no tiers")

    def _draw(self, step: _Step, masks: dict[int, bytes]) -> Mapping[str, Array]:
        """Runs the sampler for the sampling rows; what was drawn is in the history and known."""
        call = self._sampler_calls.call(step.rows, masks)
        drawn = self._programs.sampler.run({**call.inputs, "logits": step.outputs["logits"]}, call.env)
        self._slots.advance(step.rows.slots[step.rows.sampling][drawn["status"] == 0])
        return drawn

    def _prompt_logprobs(self, step: _Step) -> dict[int, tuple[TokenLogprob, ...]]:
        run, outputs = self._programs.prompt_logprobs.run, step.outputs
        parts = prompt_parts(self._slots, step.rows, self._info.max_slots)
        return gathered_logprobs((p, run({**p.call.inputs, "x": outputs["x"]}, p.call.env)) for p in parts)

    def _pooled(self, step: _Step) -> dict[int, bytes]:
        """Vectors of the prompts that end in this step."""
        state, rows = self._slots, step.rows
        for part in hidden_parts(state, rows, self._info.max_slots):
            inputs = {**part.call.inputs, "x": step.outputs["x"]}
            results = self._programs.hidden_states.run(inputs, part.call.env)
            self._pools.add(part, results["hidden"])
        return {prompt.row: self._pools.take(prompt) for prompt in whole_prompts(state, rows)}
