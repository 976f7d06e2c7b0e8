"""The Runner on a GPU: deltas and work are put on one stream, ids come back when the device is that far.

    forward(plan) ─► histories, tables, inputs (pinned) ─► gather ─► graph or launches
    sample(…)     ─► sampler's graph ─► append to history ─► ids to pinned memory ─► event
    wait()        ─► waits for that event; two steps may be on the stream meanwhile

Steps of one token a row make their inputs on the device. While the same rows go on, each a token further,
nothing is sent at all, and nothing fetched: one graph, forward pass and sampler together, leaves what it
draws in the host's memory.

What it shares with the host's runner: kv/device keeps the counts, runner/sampling.py the sampler's inputs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from typing import Any

import numpy as np

from pegainfer.contract.errors import InvariantError
from pegainfer.contract.step import BlockCopy, RunnerInfo, StepPlan
from pegainfer.kv.device.slots import Slots
from pegainfer.kv.device.stage import StagedRows, Staging
from pegainfer.runner.buckets import Bucket, Buckets
from pegainfer.runner.parts import Parts
from pegainfer.runner.pending import Part, PendingDraw, Step
from pegainfer.runner.results import ASKED, DRAWN, DrawnRing, ResultBuffer
from pegainfer.runner.sampling import PromptPart, prompt_parts, sampler_call
from pegainfer.runtime.cuda.driver import errors_at
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.stream import Event

Array = np.ndarray[Any, Any]
NOBODY = np.zeros(0, np.int64)
BUFFERS = 4  # of results: two steps in flight, the end of the one before them, one to spare
PLAIN = {"J": 0, "E": 0, "U": 0, "O": 0}  # sampling without biases, masks and banned tokens


class CudaRunner:
    """Implements contract.step.Runner and Preparing; one thread at a time.

    Call `start` when the weights are loaded.
    """

    def __init__(self, info: RunnerInfo, parts: Parts, max_logprobs: int) -> None:
        """`max_logprobs`: as the programs were made for."""
        self._info = info
        self._parts = parts
        self._stream = parts.stream
        self._slots = Slots(info, max_logprobs)
        self._staging = Staging(self._slots, info)
        self._buckets = Buckets(info)
        self._coming = self._buckets.all()  # those that are still to be made ready, and some that are
        self._ready: set[Bucket | int] = set()  # an int is a batch of the sampler's
        self._max_logprobs = max_logprobs
        self._spare: deque[ResultBuffer] = deque()
        self._drawn = DrawnRing(info.max_slots)
        self._ahead: Event | None = None  # the end of the step launched last
        self._counts = [0] * info.max_slots  # blocks in each slot's table
        self._whole: dict[Bucket, Graph] = {}  # decode steps with their sampling
        self._last: StagedRows | None = None  # of the last forward pass, if another could continue it
        self._sent: bool | None = None  # whether the sampler's inputs, if still there, ask for logprobs
        self._last_forward = 0
        self._thread = threading.get_ident()

    def start(self, seconds: float) -> int:
        """Makes the likeliest sizes ready for as long as there is time, the others by `prepare` or when they
        first come.

        Returns how many there are.
        """
        end = time.perf_counter() + seconds
        while time.perf_counter() < end and self.prepare():
            pass
        self._spare.extend(self._results() for _ in range(BUFFERS))
        self._stream.synchronize("start")
        return len(self._ready)

    def prepare(self) -> bool:
        """Makes one more size ready; False where all are. See contract.step.Preparing."""
        self._enter_thread()
        self._last = None
        for bucket in self._coming:
            if bucket not in self._ready:
                self._make_ready(bucket)
                return True
        return False

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def forward(self, plan: StepPlan) -> Step:
        self._enter_thread()
        started = time.perf_counter()
        drawn = None
        with errors_at("step", plan.step):
            self._slots.apply(plan)
            self._send_deltas(plan)
            self._copy(plan.copies)
            last = self._last if not (plan.news or plan.frees) else None
            if plan.repeats and last is not None and last.decode and len(last.sampling) == len(plan.rows):
                rows, continues = last.advanced(), True
            else:
                rows = self._staging.rows(plan)
                continues = last is not None and rows.continues(last)
            staged = time.perf_counter()
            results = self._take_buffer()
            began = self._begin(results)
            if rows.decode and plan.rows:
                draws = plan.repeats and continues and self._can_draw()
                drawn = self._run_decode(rows, continues, draws)
            elif plan.rows:
                self._run_forward(rows)
            self._copy(plan.snapshots)
        self._last, self._last_forward = rows if plan.rows else None, plan.step
        return Step(plan, rows, results, continues, began, drawn, staged - started)

    def sample(self, handle: Step, masks: dict[int, bytes] | None = None) -> PendingDraw:
        self._enter_thread()
        step = handle
        if step.plan.step != self._last_forward:
            raise InvariantError(
                f"step {step.plan.step} is sampled after step {self._last_forward} has overwritten its logits"
            )
        with errors_at("step", step.plan.step):
            parts = [self._run_prompt(p) for p in self._prompt_parts(step.rows)]
            if len(step.rows.sampling):
                self._draw(step, masks or {})
            step.results.ended.record(self._stream)
            self._ahead = step.results.ended
        return PendingDraw(step, parts, self._drawn, self._spare.append)

    def close(self) -> None:
        """Returns when all work has ended."""
        self._enter_thread()
        self._parts.close()

    def _enter_thread(self) -> None:
        if self._thread != threading.get_ident():
            self._parts.device.make_current()
            self._thread = threading.get_ident()

    def _results(self) -> ResultBuffer:
        return ResultBuffer(self._info.max_slots, self._max_logprobs)

    def _take_buffer(self) -> ResultBuffer:
        """The one given back first: its events are still asked for when the step after the next is begun."""
        return self._spare.popleft() if self._spare else self._results()

    def _begin(self, results: ResultBuffer) -> Event:
        """An event at the step's start; none is recorded where the step before runs up to it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.done():
            return ahead
        results.began.record(self._stream)
        return results.began

    def _send_deltas(self, plan: StepPlan) -> None:
        for new in plan.news:
            self._counts[new.slot] = 0
            self._parts.state.enter(new.slot, np.frombuffer(new.tokens, "<i4"))
        slots: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for change in plan.blocks:
            start = self._counts[change.slot]
            self._counts[change.slot] = start + len(change.blocks)
            slots += [change.slot] * len(change.blocks)
            places += range(start, start + len(change.blocks))
            blocks += change.blocks
        if slots:
            self._parts.state.extend(slots, places, blocks)

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Whole blocks, in order."""
        if not copies:
            return
        pool = self._parts.pool
        nbytes = pool.nbytes // pool.shape[0]
        for c in copies:
            self._stream.copy(pool.address + c.dst * nbytes, pool.address + c.src * nbytes, nbytes, c)

    def _run_decode(self, rows: StagedRows, continues: bool, draw: bool) -> int | None:
        """`draw`: with the sampler, whose inputs are on the device; returns the slot of what is drawn."""
        bucket = self._buckets.of(rows.env["T"], rows.env["R"], True)
        self._make_ready(bucket)
        if not continues:
            self._parts.state.enter_batch(rows.slots, rows.starts, rows.sampling)
        if not draw:
            self._parts.forward.replay(rows.env, True)
            return None
        if bucket not in self._whole:
            self._whole[bucket] = self._join(bucket)
        self._whole[bucket].launch(self._stream)
        return self._drawn.take()

    def _can_draw(self) -> bool:
        """Whether a step that goes on can be drawn at once.

        The sampler's inputs must be on the device, and nobody want more than the token.
        """
        return self._parts.graphs and self._sent is False and self._slots.sampling.plain

    def _join(self, bucket: Bucket) -> Graph:
        """A decode step and its sampling in one graph: milliseconds, when a batch first goes on."""
        sampling = {"L": bucket.rows, **PLAIN}
        drawn = self._parts.sampler.outputs(sampling)
        addresses = drawn["tokens"].address, drawn["status"].address
        work = [
            *self._parts.forward.launches(bucket.env, True),
            *self._parts.sampler.launches(sampling),
            self._parts.state.publish(*addresses, bucket.rows, self._drawn.place),
        ]

        def body() -> None:
            for launch in work:
                launch(self._stream)

        return Graph(self._stream, body, f"decode and sampling of {bucket.rows} rows")

    def _run_forward(self, rows: StagedRows) -> None:
        inputs = self._staging.inputs(rows)
        width = self._parts.state.history.shape[1]
        places = np.repeat(rows.slots * width, rows.counts) + inputs["positions"]
        self._parts.state.gather(rows.slots, places)
        self._make_ready(self._buckets.of(rows.env["T"], rows.env["R"], False))
        self._parts.forward.run(inputs, rows.env)

    def _make_ready(self, bucket: Bucket) -> None:
        if bucket in self._ready:
            return
        make_inputs = None
        if bucket.decode:
            # It runs once, on the batch that is there: that one would be counted on and its cache written.
            self._parts.state.enter_batch(NOBODY, NOBODY, NOBODY)
            self._make_sampler_ready(bucket.rows)
            sampling = {"L": bucket.rows, **PLAIN}
            counters = [self._parts.sampler.input_address(n, sampling) for n in ("history_lens", "draws")]
            make_inputs = partial(self._parts.state.decode_inputs, bucket.rows, counters=counters)
        self._parts.forward.capture(bucket.env, bucket.decode, graph=bucket.graph, make_inputs=make_inputs)
        self._ready.add(bucket)

    def _make_sampler_ready(self, batch: int) -> None:
        if batch not in self._ready:
            self._parts.sampler.capture({"L": batch, **PLAIN}, False)
            self._ready.add(batch)

    def _draw(self, step: Step, masks: dict[int, bytes]) -> None:
        """No host knows yet whether a draw fails."""
        rows = step.rows
        plain = self._slots.sampling.plain and not masks
        if step.drawn is not None:
            if masks:
                raise InvariantError(f"step {step.plan.step} repeats the one before, but has masks")
            self._slots.advance(rows.slots)
            return
        if plain and step.continues and self._sent is not None:
            asked = self._sent  # the forward pass has counted the sampler's inputs on
            outputs = self._parts.sampler.replay({"L": rows.env["L"], **PLAIN}, False)
        else:
            call = sampler_call(self._slots, rows, masks)
            self._make_sampler_ready(self._buckets.batch(len(rows.sampling)))
            outputs = self._parts.sampler.run(call.inputs, call.env)
            asked = bool((call.inputs["top_lens"] >= 0).any())
            self._sent = asked if plain else None
        self._slots.advance(rows.slots[rows.sampling])
        step.results.fetch(outputs, (*DRAWN, *ASKED) if asked else (*DRAWN,), self._stream)

    def _prompt_parts(self, rows: StagedRows) -> list[PromptPart]:
        # A decode step whose rows all sample is past every prompt.
        if rows.env["T"] == rows.env["L"]:
            return []
        return list(prompt_parts(self._slots, rows, self._info.max_slots))

    def _run_prompt(self, part: PromptPart) -> Part:
        """One program over all rows that a part can have: its launches are packed once."""
        env = {"T": self._info.max_tokens, "L": self._info.max_slots}
        if -1 not in self._ready:
            self._parts.prompt_logprobs.capture(env, False, graph=False)
            self._ready.add(-1)
        outputs = self._parts.prompt_logprobs.run(part.call.inputs, {**env, "L": part.call.env["L"]})
        results = self._take_buffer()
        results.fetch(outputs, (*ASKED,), self._stream)
        return Part(part, results)
