"""The llama line's Runner on a host device: plans in, tokens out, in order, on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.step import RunnerInfo, StepPlan, StepResult
from pegainfer.kv.device.pool import KVPool
from pegainfer.kv.device.slots import Slots
from pegainfer.kv.device.stage import StagedRows, Staging
from pegainfer.ops.backend import Backend, Executor
from pegainfer.ops.sample import STATUS_NOT_FINITE, STATUS_NOTHING_LEFT
from pegainfer.runtime.worker import Task, Worker

Array = np.ndarray[Any, Any]

_FAULTS = {
    STATUS_NOT_FINITE: "the model's logits are not finite",
    STATUS_NOTHING_LEFT: "masks and banned tokens leave no token that could be drawn",
}


@dataclass(frozen=True)
class Programs:
    """What a step runs; see models/llama/forward.py and ops/sampler.py."""

    forward: Executor
    sampler: Executor
    prompt_logprobs: Executor


@dataclass(frozen=True)
class _Step:
    """A forward pass that has run and waits for its sampling."""

    plan: StepPlan
    rows: StagedRows
    outputs: Mapping[str, Array]
    seconds: float


class LlamaRunner:
    """Implements contract.step.Runner.

    `forward` and `sample` only queue their work; the worker applies deltas, computes and draws in the order
    of the calls, so that a row that follows an uncommitted one finds its token in the history. A step is
    sampled before the next one's forward is queued: both write the same output arrays.
    """

    def __init__(
        self, info: RunnerInfo, slots: Slots, pool: KVPool, programs: Programs, backend: Backend
    ) -> None:
        """Takes over all of them; `backend` is closed with the runner."""
        self._info = info
        self._backend = backend
        self._slots = slots
        self._pool = pool
        self._programs = programs
        self._staging = Staging(slots, info)
        self._last_forward = 0  # the step whose outputs the arrays hold; the worker's
        self._worker = Worker("llama-runner")

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def forward(self, plan: StepPlan) -> Task[_Step]:
        return self._worker.submit(partial(self._forward, plan))

    def sample(self, handle: Task[_Step], masks: dict[int, bytes] | None = None) -> Task[StepResult]:
        return self._worker.submit(partial(self._sample, handle, masks or {}))

    def close(self) -> None:
        """Returns when every queued step has ended."""
        self._worker.close()
        self._backend.close()

    # What follows runs on the worker's thread.

    def _forward(self, plan: StepPlan) -> _Step:
        started = time.perf_counter()
        self._slots.apply(plan)
        self._pool.copy(plan.copies)
        rows = self._staging.stage(plan)
        outputs = self._programs.forward.run(rows.inputs, rows.env) if plan.rows else {}
        self._pool.copy(plan.snapshots)
        self._last_forward = plan.step
        return _Step(plan, rows, outputs, time.perf_counter() - started)

    def _sample(self, handle: Task[_Step], masks: dict[int, bytes]) -> StepResult:
        step = handle.wait()  # it has ended: the worker runs in order; raises what the forward pass raised
        started = time.perf_counter()
        if step.plan.step != self._last_forward:
            raise InvariantError(
                f"step {step.plan.step} is sampled after step {self._last_forward} has overwritten its logits"
            )
        prompt_logprobs = self._prompt_logprobs(step)
        tokens: list[tuple[int, ...]] = [()] * len(step.plan.rows)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        errors: dict[int, str] = {}
        if len(step.rows.sampling):
            drawn = self._draw(step, masks)
            status, best = drawn["status"].tolist(), _token_logprobs(drawn, drawn["tokens"])
            for place, row in enumerate(step.rows.sampling.tolist()):
                if status[place]:
                    errors[row] = _FAULTS[status[place]]
                    continue
                tokens[row] = (int(drawn["tokens"][place]),)
                if (entry := best[place]) is not None:
                    logprobs[row] = (entry,)
        return StepResult(
            step=step.plan.step,
            tokens=tuple(tokens),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            seconds=step.seconds + time.perf_counter() - started,
        )

    def _draw(self, step: _Step, masks: dict[int, bytes]) -> Mapping[str, Array]:
        """Runs the sampler for the sampling rows; what was drawn is in the history and known."""
        state, rows = self._slots, step.rows.sampling
        slots = step.rows.slots[rows]
        known, prompt = state.known[slots], state.num_prompt[slots]
        places = {row: place for place, row in enumerate(rows.tolist())}
        draws = (known - prompt).astype(np.int32)
        inputs = state.sampling.stage(slots, draws, {places[row]: mask for row, mask in masks.items()})
        inputs |= {
            "logits": step.outputs["logits"],
            "slots": slots.astype(np.int32),
            "history_lens": known.astype(np.int32),
            "prompt_lens": prompt.astype(np.int32),
        }
        env = {
            "L": len(rows),
            "J": len(inputs["bias_ids"]),
            "E": len(inputs["masks"]),
            "U": len(inputs["banned_tokens"]),
            "O": len(inputs["banned_seq_lens"]),
        }
        drawn = self._programs.sampler.run(inputs, env)
        state.advance(slots[drawn["status"] == 0])
        return drawn

    def _prompt_logprobs(self, step: _Step) -> dict[int, tuple[TokenLogprob, ...]]:
        """Of the prompt tokens that follow each computed position, in rows whose requests ask for them."""
        state, rows = self._slots, step.rows
        asked = state.sampling.prompt_logprobs[rows.slots]
        # The token after a row's last position is drawn, not given, where the prompt ends.
        stops = np.minimum(rows.starts + rows.counts, state.num_prompt[rows.slots] - 1)
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        for row in np.flatnonzero((asked >= 0) & (stops > rows.starts)).tolist():
            start, stop, slot = int(rows.starts[row]), int(stops[row]), int(rows.slots[row])
            first = int(rows.inputs["query_starts"][row])
            targets = state.history[slot, start + 1 : stop + 1]
            entries: list[TokenLogprob] = []
            for at in range(0, len(targets), self._info.max_slots):
                part = targets[at : at + self._info.max_slots]
                inputs = {
                    "x": step.outputs["x"],
                    "logit_rows": np.arange(first + at, first + at + len(part), dtype=np.int32),
                    "targets": np.ascontiguousarray(part),
                    "top_lens": np.full(len(part), asked[row], np.int32),
                }
                results = self._programs.prompt_logprobs.run(inputs, {"T": rows.env["T"], "L": len(part)})
                entries += (e for e in _token_logprobs(results, part) if e is not None)
            found[row] = tuple(entries)
        return found


def _token_logprobs(results: Mapping[str, Array], tokens: Array) -> list[TokenLogprob | None]:
    """One entry a row, None where none was asked for (rank 0)."""
    ranks = results["ranks"].tolist()
    if not any(ranks):
        return [None] * len(ranks)
    columns = (tokens, results["logprobs"], results["top_ids"], results["top_logprobs"])
    rows = zip(ranks, *(c.tolist() for c in columns), strict=True)
    return [
        TokenLogprob(token, logprob, rank, tuple((i, p) for i, p in zip(ids, best, strict=True) if i >= 0))
        if rank
        else None
        for rank, token, logprob, ids, best in rows
    ]
