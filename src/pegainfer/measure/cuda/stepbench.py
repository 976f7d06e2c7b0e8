"""Measures what each op adds to a whole step, from graphs of growing parts of a model's forward pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy, fill_normal
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.measure.opbench import InStep, StepTimes
from pegainfer.measure.step_shapes import StepShape
from pegainfer.measure.workload import FamilyKey, Pages, blocks_of, family_key, positions_of
from pegainfer.ops.cases.common import i32
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
NameWork = Callable[[list[Work], bool], tuple[str, ...]]
ROUNDS, REPLAYS = 3, 6  # of each graph
SEED = 7


class CudaSteps:
    """A model's forward pass on dummy weights.

    In a step, a launch starts while the one before it ends, weights are fetched ahead of that, and a GEMM may
    compute sums for the next one's norm. An op by itself shows none of this, so its price in a step is a
    difference: the time of the launches of all layers up to this op in each layer, minus the time of the
    launches before it. The overlap of an op with the one before it counts for the later op, and all prices
    add up to the step. (Leaving one op out of the whole step gives wrong prices: the neighbours of a short op
    then overlap differently, and take longer by as much as the op took.)

    Args:
        program: of a KV cache with blocks enough for every shape that will be timed.
        shapes: those.
    """

    def __init__(self, ctx: CudaContext, program: Program, shapes: tuple[StepShape, ...]) -> None:
        self._ctx = ctx
        backend = CudaBackend(ctx, {}, CudaOptions(), Dummy())
        states = {
            t.name: DeviceTensor.empty(t.sizes({}), t.dtype, t.name) for t in program.tensors(Kind.STATE)
        }
        for state in states.values():
            fill_normal(ctx, state, SEED)
        envs = [s.env for s in shapes]
        self._executor = backend.prepare(program, states, {a: max(e[a] for e in envs) for a in "TRL"})
        backend.load()

    def time(self, shape: StepShape, wanted: Collection[FamilyKey], name: NameWork) -> StepTimes:
        """Of one step: the whole, and what each of the wanted ops adds, a call.

        Args:
            name: kernels of some launches, as the ledger has them, and whether each row decodes a token.
        """
        env, decode = shape.env, shape.count == 1
        self._executor.capture(env, decode, graph=False)  # cuBLASLt's algorithms are timed here
        for _, _, run in self._executor.walk(step_arrays(self._executor.program, shape), env):
            run()
        self._executor.begin(env, decode)
        step = self._executor.work(env, decode)
        cost = self._executor.program.cost(env)
        if len(launches := [w for _, work in step for w in work]) == 1:
            times = graph_times(self._ctx, launches, ROUNDS * REPLAYS, "step bench")
            return StepTimes(statistics.median(times), cost, {}, name(launches, decode))
        groups = grouped(step)
        parts = self._times(step, list(groups))
        calls = {
            key: InStep(max(0.0, after - before) / len(calls), name(calls[-1][1], decode))
            for (key, calls), (before, after) in zip(groups.items(), pairwise([0.0, *parts]), strict=True)
            if key in wanted
        }
        return StepTimes(parts[-1], cost, calls)

    def close(self) -> None:
        """Device memory goes with this object."""
        self._ctx.stream.synchronize("step bench")
        del self._executor

    def _times(self, step: list[tuple[OpCall, list[Work]]], order: list[FamilyKey]) -> list[float]:
        """Median microseconds of the launches of the first op, the first two, and so on.

        In rounds, for the card's clock follows its load.
        """
        samples: list[list[float]] = [[] for _ in order]
        for _ in range(ROUNDS):
            for i, found in enumerate(samples):
                work = [w for call, launches in step if family_key(call) in order[: i + 1] for w in launches]
                found += graph_times(self._ctx, work, REPLAYS, "step bench")
        return [statistics.median(found) for found in samples]


def grouped(
    step: Iterable[tuple[OpCall, list[Work]]],
) -> Mapping[FamilyKey, list[tuple[OpCall, list[Work]]]]:
    """Calls that differ in layer and weights alone."""
    found: dict[FamilyKey, list[tuple[OpCall, list[Work]]]] = {}
    for call, work in step:
        found.setdefault(family_key(call), []).append((call, work))
    return found


def step_arrays(program: Program, shape: StepShape) -> dict[str, Array]:
    """Inputs of a forward pass: tokens anywhere in the vocabulary, each row's pages in no order."""
    rng = np.random.default_rng(SEED)
    inputs = {t.name: t for t in program.tensors(Kind.INPUT)}
    (pool,) = program.tensors(Kind.STATE)
    blocks, block_size = pool.sizes({})[0], pool.sizes({})[4]
    pages = Pages(rng.permutation(blocks), block_size)
    table = np.zeros((shape.rows, inputs["kv.block_table"].sizes(shape.env)[1]), np.int32)
    table[:, : blocks_of(shape, block_size)] = pages.table(shape, 0)
    starts = np.arange(shape.rows) * shape.count
    vocabulary = next(int(c.axes["V"]) for c in program.calls if "V" in c.axes)
    return {
        "token_ids": i32(rng.integers(0, vocabulary, shape.rows * shape.count)),
        "positions": positions_of(shape),
        "kv.places": pages.slots(shape, 0),
        "query_starts": i32(starts),
        "query_lens": np.full(shape.rows, shape.count, np.int32),
        "context_lens": np.full(shape.rows, shape.context, np.int32),
        "kv.block_table": table,
        "logit_rows": i32(starts + shape.count - 1),
    }
