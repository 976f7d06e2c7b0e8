"""The llama line's Runner on a host device: plans in, tokens out, in order, on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.step import PageGroup, RunnerInfo, StepPlan, StepResult
from pegainfer.kv.device.pool import KVPool
from pegainfer.kv.device.slots import Slots
from pegainfer.kv.device.stage import StagedRows, Staging
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.forward import Sizes, forward, prompt_logprobs
from pegainfer.models.llama.weights import LlamaWeights, to_float32
from pegainfer.ops.program import Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.sample import STATUS_NOT_FINITE, STATUS_NOTHING_LEFT
from pegainfer.ops.sampler import sampler
from pegainfer.ops.tensor import FORMATS
from pegainfer.runtime.worker import Task, Worker

Array = np.ndarray[Any, Any]

KV_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}
_FAULTS = {
    STATUS_NOT_FINITE: "the model's logits are not finite",
    STATUS_NOTHING_LEFT: "masks and banned tokens leave no token that could be drawn",
}


class Executor(Protocol):
    """A recorded program, ready to run. Outputs are valid until its next run."""

    def run(self, inputs: Mapping[str, Array], env: Mapping[str, int]) -> Mapping[str, Array]: ...


# Makes a program ready to run: (program, its states by name, the largest step sizes). Weights are the
# backend's own, packed before.
Backend = Callable[[Program, Mapping[str, Array], Mapping[str, int]], Executor]


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

    def __init__(self, info: RunnerInfo, slots: Slots, pool: KVPool, programs: Programs) -> None:
        self._info = info
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


def kv_group(config: LlamaConfig, block_size: int, kv_dtype: str) -> PageGroup:
    """All layers' keys and values of a block of tokens lie together, so that a block is one copy."""
    values = config.num_layers * 2 * config.kv_size * block_size
    return PageGroup(name="kv", block_size=block_size, bytes_per_block=values * FORMATS[kv_dtype][1])


def reference_backend(weights: LlamaWeights, num_positions: int) -> Backend:
    """The ops' NumPy references on float32 weights: what every other backend is compared with."""
    constants = {name: to_float32(w) for name, w in weights.tensors.items()}
    constants["cos_sin"] = weights.cos_sin(num_positions)
    return lambda program, states, largest: ReferenceExecutor(program, {**constants, **states})


def build(
    weights: LlamaWeights, info: RunnerInfo, backend: Backend, *, kv_dtype: str, max_logprobs: int
) -> LlamaRunner:
    """A runner whose programs `backend` has made ready.

    Args:
        info: its one KV group is that of `kv_group`.
        kv_dtype: a key of KV_DTYPES.
    """
    config, max_logprobs = weights.config, min(max_logprobs, info.vocab_size)
    (group,) = (g for g in info.kv.groups if isinstance(g, PageGroup))
    sizes = Sizes(
        num_blocks=info.num_blocks[0],
        block_size=group.block_size,
        blocks_per_seq=-(-info.max_model_len // group.block_size),
        num_positions=info.max_model_len,
        kv_dtype=kv_dtype,
    )
    slots = Slots(info, max_logprobs)
    block_shape = (config.num_layers, 2, config.num_kv_heads, group.block_size, config.head_dim)
    pool = KVPool(info.num_blocks[0], block_shape, KV_DTYPES[kv_dtype])
    states = {"kv": pool.array, "history": slots.history}
    largest = {"T": info.max_tokens, "R": info.max_slots, "L": info.max_slots}
    programs = Programs(
        *(
            backend(program, states, largest)
            for program in (
                forward(config, weights.formats, sizes),
                sampler(info.vocab_size, info.max_slots, slots.history.shape[1], max_logprobs),
                prompt_logprobs(config, weights.formats, max_logprobs),
            )
        )
    )
    return LlamaRunner(info, slots, pool, programs)
