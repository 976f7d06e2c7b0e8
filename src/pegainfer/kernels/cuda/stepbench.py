"""What each op adds to a whole step: graphs of a model's forward pass with and without the op's launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from pegainfer.kernels.cuda.backend import CudaBackend
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.executor import CudaOptions
from pegainfer.kernels.cuda.site import Work
from pegainfer.kernels.cuda.store import Dummy, fill_normal
from pegainfer.kernels.cuda.timing import graph_times
from pegainfer.kernels.loads import StepShape
from pegainfer.kernels.opbench import InStep, StepTimes
from pegainfer.kernels.workload import FamilyKey, Pages, blocks_of, family_key, positions_of
from pegainfer.ops.cases.common import i32
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.tensor import DeviceTensor

Array = np.ndarray[Any, Any]
NameWork = Callable[[list[Work], bool], tuple[str, ...]]
REPLAYS = 10  # of each graph
SEED = 7


class CudaSteps:
    """A model's forward pass on dummy weights.

    In a step, a launch starts while the one before it ends, weights are fetched ahead of that, and a product
    may hand its rows to the next one's norm. None of this can be seen in an op by itself, so its price in a
    step is a difference: the time of all launches less the time without the op's. These differences need not
    add up to the step: where two ops overlap, each is charged for what the other could not hide.

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
        step = self._executor.work(env, decode)
        groups = grouped(step)
        before = self._us(step, None)
        without = {key: self._us(step, key) for key in groups if key in wanted}
        whole = (before + self._us(step, None)) / 2
        calls = {
            key: InStep(max(0.0, whole - us) / len(groups[key]), name(groups[key][-1][1], decode))
            for key, us in without.items()
        }
        return StepTimes(whole, self._executor.program.cost(env), calls)

    def close(self) -> None:
        """Device memory goes with this object."""
        self._ctx.stream.synchronize("step bench")
        del self._executor

    def _us(self, step: list[tuple[OpCall, list[Work]]], leave_out: FamilyKey | None) -> float:
        """Median microseconds of a graph of a step's launches."""
        work = [w for call, launches in step if family_key(call) != leave_out for w in launches]
        return statistics.median(graph_times(self._ctx, work, REPLAYS, "step bench"))


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
    table = np.zeros((shape.rows, inputs["block_table"].sizes(shape.env)[1]), np.int32)
    table[:, : blocks_of(shape, block_size)] = pages.table(shape, 0)
    starts = np.arange(shape.rows) * shape.count
    vocabulary = next(int(c.axes["V"]) for c in program.calls if "V" in c.axes)
    return {
        "token_ids": i32(rng.integers(0, vocabulary, shape.rows * shape.count)),
        "positions": positions_of(shape),
        "slots": pages.slots(shape, 0),
        "query_starts": i32(starts),
        "query_lens": np.full(shape.rows, shape.count, np.int32),
        "context_lens": np.full(shape.rows, shape.context, np.int32),
        "block_table": table,
        "logit_rows": i32(starts + shape.count - 1),
    }
