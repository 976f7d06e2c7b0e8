"""The Runner on a GPU: deltas and work are put on one stream, ids come back once the device has drawn them.

    forward(plan) ─► histories, tables, inputs (pinned) ─► gather ─► graph or launches
    sample(…)     ─► sampler's graph ─► append to history ─► ids to pinned memory ─► event
    wait()        ─► waits for that event; two steps may be on the stream meanwhile

Steps of one token a row make their inputs on the device. While the same rows go on, each a token further,
nothing is sent and nothing fetched: one graph, forward pass and sampler together, writes the drawn tokens to
the host's memory.
Long because all of this is one order of work on one stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.experts import ExpertTokens
from pegainfer.contract.step import RunnerInfo, StepPlan
from pegainfer.kv.device.cuda_copies import cuda_transfers
from pegainfer.kv.device.store import BlockStore
from pegainfer.kv.device.transfers import Transfers
from pegainfer.ops.program import Program
from pegainfer.runner.buckets import Buckets
from pegainfer.runner.cuda_expert_counts import CudaExpertCounts
from pegainfer.runner.parts import Executor, Parts
from pegainfer.runner.pending import Part, PendingDraw, PendingPools, Step
from pegainfer.runner.pooling import Pools, hidden_parts, whole_prompts
from pegainfer.runner.ready import PLAIN, ReadySizes
from pegainfer.runner.results import ASKED, DRAWN, DrawnRing, HiddenBuffer, ResultBuffer
from pegainfer.runner.sampling import Call, PromptPart, check_sampled_in_time, prompt_parts, sampler_call
from pegainfer.runner.serves_adapters import ServesAdapters
from pegainfer.runner.serves_adapters import Slots as AdapterSlots
from pegainfer.runner.slots import Slots
from pegainfer.runner.staging import StagedRows, Staging
from pegainfer.runtime.cuda.driver import errors_at
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.stream import Event
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
BUFFERS = 4  # of results: two steps in flight, one whose end event is still needed, one to spare


class CudaRunner(ServesAdapters):
    """Implements contract.step.Runner, Preparing and AdapterRunner for one thread; `start` comes first."""

    def __init__(
        self,
        info: RunnerInfo,
        parts: Parts,
        max_logprobs: int,
        adapters: AdapterSlots | None = None,
        experts: CudaExpertCounts | None = None,
    ) -> None:
        """`max_logprobs`: most alternatives a token, as the programs were recorded with."""
        self._adapters, self._experts = adapters, experts
        self._info = info
        self._parts = parts
        self._stream = parts.stream
        self._slots = Slots(info, max_logprobs)
        self._staging = Staging(self._slots, info, parts.inputs)
        self._sizes = ReadySizes(parts, Buckets(info))
        self._cold_before = 0.0  # seconds that the stream had counted before the step under way
        self._max_logprobs = max_logprobs
        self._spare: deque[ResultBuffer] = deque()
        self._spare_parts: deque[ResultBuffer] = deque()  # of prompts' parts, whose events nobody waits for
        self._drawn = DrawnRing(info.max_slots)
        self._last_end: Event | None = None  # end of the step launched last
        self._last: StagedRows | None = None  # of the last step, if each row is one token and samples
        self._repeat_graph: Graph | None = None  # runs a step that repeats the last one
        self._repeated = 0  # repeated steps that `_last` and `_slots` do not count yet
        # Whether the sampler's inputs on the device ask for logprobs; None where they are of another step.
        self._sampler_inputs: bool | None = None
        self._packed: set[Executor] = set()  # programs that read a step's results, once they are ready
        self._transfers: Transfers | None = None
        self._pools = Pools()
        self._spare_hidden: deque[HiddenBuffer] = deque()
        self._last_forward = 0

    def use_tiers(self, stores: Sequence[BlockStore], free: Callable[[], None] | None = None) -> None:
        """Takes over the stores of `info.tiers`, before the first step. `free`: see Transfers."""
        self._transfers = cuda_transfers(self._parts.pools, self._parts.device, self._info, stores, free)

    def start(self, seconds: float) -> int:
        """Makes sizes of steps ready, the likeliest first, until the time is over. Others are made ready by
        `prepare`, or by the first step that needs them.

        Returns how many are ready.
        """
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and self._make_next(at_once=True):
            pass
        self._spare.extend(self._results() for _ in range(BUFFERS))
        self._stream.synchronize("start")
        return len(self._sizes)

    def prepare(self) -> bool:
        """Makes one more size ready; False where all are. See contract.step.Preparing."""
        return self._make_next(at_once=False)

    def _make_next(self, at_once: bool) -> bool:
        self._parts.device.enter()
        self._end_repeats()  # a size that is made ready runs once, which overwrites the batch on the device
        return self._sizes.make_next(at_once)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def forward_program(self) -> Program:
        """The forward pass as it was lowered; where there are two, that of steps without adapters."""
        return self._parts.forward.program

    def forward(self, plan: StepPlan) -> Step:
        self._parts.device.enter()
        started, self._cold_before = time.perf_counter(), self._stream.cold_seconds
        with errors_at("step", plan.step):
            others = plan.news or plan.frees or plan.copies or plan.transfers or plan.reset_tiers
            if plan.repeats and not others:
                graph = self._repeat_graph or self._begin_repeats()
                if graph is not None:
                    return self._repeat(plan, graph, started)
            return self._forward(plan, started)

    def _repeat(self, plan: StepPlan, graph: Graph, started: float) -> Step:
        """Runs the last step again, one token further, with the least work on the host."""
        assert self._last is not None
        if plan.blocks or plan.snapshots:
            self._slots.apply(plan)
            self._parts.state.apply(plan)
        if plan.snapshots:
            rows = self._advanced(self._last, plan, self._repeated + 1)
            if rows.saves:
                self._parts.state.enter_batch(rows.slots, rows.starts, rows.sampling, rows.saves)
        results = self._take_buffer()
        began = self._begin(results)
        staged = time.perf_counter() - started
        graph.launch(self._stream)
        self._count_experts(self._last.env["T"])
        self._repeated += 1
        self._last_forward = plan.step
        return Step(plan, self._last, results, True, began, self._drawn.take(), staged)

    def _begin_repeats(self) -> Graph | None:
        """The graph that repeats the last step; None where a graph alone cannot.

        The sampler's inputs must be on the device, and no request may ask for more than tokens.
        """
        last, tokens_alone = self._last, self._sampler_inputs is False and self._slots.sampling.plain
        if last is None or not (self._parts.graphs and tokens_alone):
            return None
        adapted = self._slots.have_adapters(last.slots)
        self._repeat_graph = self._sizes.joined(last.env["R"], adapted, self._drawn.place)
        return self._repeat_graph

    def _end_repeats(self) -> StagedRows | None:
        """Counts the repeated steps. Returns the rows of the last step and forgets them."""
        last, self._last, self._repeat_graph = self._last, None, None
        if last is not None and self._repeated:
            self._slots.advance(last.slots, self._repeated)
            last = last.advanced(self._repeated)
        self._repeated = 0
        return last

    def _forward(self, plan: StepPlan, started: float) -> Step:
        last = self._end_repeats()
        self._slots.apply(plan)
        self._parts.state.apply(plan)
        self._parts.pools.copy(plan.copies, self._stream)
        if self._transfers is not None:
            self._transfers.begin(plan)
        continues = plan.repeats and last is not None and not (plan.news or plan.frees)
        rows = self._advanced(last, plan, 1) if last is not None and continues else self._staging.rows(plan)
        staged = time.perf_counter() - started
        results = self._take_buffer()
        began = self._begin(results)
        if rows.decode and plan.rows:
            self._run_decode(rows, continues)
        elif plan.rows:
            self._run_forward(rows)
        if rows.decode and 0 < len(plan.rows) == len(rows.sampling):
            self._last = rows
        self._last_forward = plan.step
        return Step(plan, rows, results, continues, began, None, staged)

    def _advanced(self, last: StagedRows, plan: StepPlan, steps: int) -> StagedRows:
        """The rows of a plan that repeats `last`, so many steps later, with the plan's snapshots."""
        if not plan.snapshots:
            return last.advanced(steps)
        saves = self._staging.state_saves(plan, last.starts + steps, last.counts)
        return last.advanced(steps, saves)

    def sample(self, handle: Step, masks: dict[int, bytes] | None = None) -> PendingDraw:
        self._parts.device.enter()
        step = handle
        check_sampled_in_time(step.plan.step, self._last_forward)
        parts: list[Part] = []
        pools = PendingPools([], [])
        with errors_at("step", step.plan.step):
            if step.drawn is None:
                parts = [self._run_prompt(p) for p in self._prompt_parts(step.rows)]
                if self._slots.sampling.pooled:
                    pools = self._run_pools(step.rows)
                if len(step.rows.sampling):
                    self._draw(step, masks or {})
            elif masks:
                raise InvariantError(f"step {step.plan.step} repeats the one before, but has masks")
            step.results.ended.record(self._stream)
        self._last_end = step.results.ended
        pooled = partial(pools.read, self._pools, self._spare_hidden)
        cold = self._stream.cold_seconds - self._cold_before
        wait = self._parts.wait
        return PendingDraw(step, parts, pooled, self._drawn, self._spare, cold, wait, self._transfers)

    def close(self) -> None:
        """Returns when all work has ended."""
        self._parts.device.enter()
        if self._transfers is not None:
            self._transfers.close()
        self._parts.close()

    def _results(self) -> ResultBuffer:
        return ResultBuffer(self._info.max_slots, self._max_logprobs)

    def _take_buffer(self) -> ResultBuffer:
        """The buffer that was given back first: the events of later ones are still in use."""
        return self._spare.popleft() if self._spare else self._results()

    def _begin(self, results: ResultBuffer) -> Event:
        """An event at the step's start: the end of the step before, if that is still running."""
        ahead, self._last_end = self._last_end, None
        if ahead is not None and not ahead.done():
            return ahead
        results.began.record(self._stream)
        return results.began

    def _run_decode(self, rows: StagedRows, continues: bool) -> None:
        adapted = self._slots.have_adapters(rows.slots)
        self._sizes.make(self._sizes.buckets.of(rows.env["T"], rows.env["R"], True, adapted))
        if rows.saves or not continues:
            self._parts.state.enter_batch(rows.slots, rows.starts, rows.sampling, rows.saves)
        self._parts.forward_of(adapted).replay(rows.env, True)
        self._count_experts(rows.env["T"])

    def _run_forward(self, rows: StagedRows) -> None:
        inputs = self._staging.inputs(rows)
        width = self._parts.state.history.shape[1]
        places = np.repeat(rows.slots * width, rows.counts) + self._staging.positions
        self._parts.state.gather(rows.slots, places)
        adapted = self._slots.have_adapters(rows.slots)
        self._sizes.make(self._sizes.buckets.of(rows.env["T"], rows.env["R"], False, adapted))
        self._parts.forward_of(adapted).run(inputs, rows.env)
        self._count_experts(rows.env["T"])

    def _count_experts(self, tokens: int) -> None:
        if self._experts is not None:
            self._experts.add(tokens)

    def expert_tokens(self) -> ExpertTokens | None:
        """As contract.experts.CountingRunner."""
        return None if self._experts is None else self._experts.tokens()

    def _draw(self, step: Step, masks: dict[int, bytes]) -> None:
        """Draws for the sampling rows. Whether a draw failed is known only when its result is read."""
        rows = step.rows
        plain = self._slots.sampling.plain and not masks
        if plain and step.continues and self._sampler_inputs is not None:
            asked = self._sampler_inputs  # the forward pass has advanced the sampler's inputs
            outputs = self._parts.sampler.replay({"L": rows.env["L"], **PLAIN}, False)
        else:
            call = sampler_call(self._slots, rows, masks)
            self._sizes.make_sampler(len(rows.sampling))
            outputs = self._parts.sampler.run(call.inputs, call.env)
            asked = bool((call.inputs["top_lens"] >= 0).any())
            self._sampler_inputs = asked if plain else None
        self._slots.advance(rows.slots[rows.sampling])
        step.results.fetch(outputs, (*DRAWN, *ASKED) if asked else (*DRAWN,), self._stream)

    def _prompt_parts(self, rows: StagedRows) -> list[PromptPart]:
        past = rows.env["T"] == rows.env["L"]  # a decode step whose rows all sample is past every prompt
        return [] if past else list(prompt_parts(self._slots, rows, self._info.max_slots))

    def _run_prompt(self, part: PromptPart) -> Part:
        outputs = self._run_over(self._parts.prompt_logprobs, part.call)
        results = self._spare_parts.popleft() if self._spare_parts else self._results()
        results.fetch(outputs, (*ASKED,), self._stream)
        return Part(part, results, self._spare_parts)

    def _run_pools(self, rows: StagedRows) -> PendingPools:
        """Hidden states of the rows that are to be pooled."""
        program, spare = self._parts.hidden_states, self._spare_hidden
        most, parts = self._info.max_slots, []
        largest = {"T": 1, "L": most}
        for part in hidden_parts(self._slots, rows, most):
            hidden = self._run_over(program, part.call)["hidden"]
            buffer = spare.popleft() if spare else HiddenBuffer(program.outputs(largest)["hidden"])
            buffer.fetch(hidden, self._stream)
            parts.append((part, buffer))
        return PendingPools(parts, whole_prompts(self._slots, rows))

    def _run_over(self, program: Executor, call: Call) -> Mapping[str, DeviceTensor]:
        """Runs a program that reads what the step left. It is made ready once, for the most rows."""
        env = {"T": self._info.max_tokens, "L": self._info.max_slots}
        if program not in self._packed:
            with self._stream.cold():
                program.capture(env, False, graph=False)
            self._packed.add(program)
        return program.run(call.inputs, {**env, "L": call.env["L"]})
