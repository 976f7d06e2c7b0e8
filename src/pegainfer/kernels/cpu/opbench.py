"""Times ops on the CPU as a step meets them: call after call in one program, weights and pages cold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pegainfer.kernels.cpu import kv
from pegainfer.kernels.cpu.backend import CpuBackend, CpuOptions
from pegainfer.kernels.cpu.executor import NUMPY
from pegainfer.kernels.cpu.roofline import last_level_cache
from pegainfer.kernels.cpu.variant import arithmetic_of
from pegainfer.kernels.workload import (
    Family,
    Options,
    Pages,
    StepShape,
    blocks_of,
    case,
    largest_of,
    sizes_of,
    step_inputs,
)
from pegainfer.ops.cases.common import i32, normal
from pegainfer.ops.check import Report, check_case, through_program
from pegainfer.ops.compose import many_calls, staged_inputs
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import raw_weight
from pegainfer.ops.spec import Arrays, Cost, Role
from pegainfer.ops.tensor import FORMATS, Kind, Sizes, Tensor
from pegainfer.runtime.weights.raw import RawWeight

Array = np.ndarray[Any, Any]

SEED = 20240607
CALLS = 32  # a program, where weights do not say otherwise
MOST_CALLS = 400  # of small weights: as many as fill twice a cache of 32 MiB
POOL_LAYERS = 4  # of the KV pool that calls walk through
MOST_IDS = 4096  # of the vocabulary in a check
SECONDS = 0.25  # spent on one shape, after one program that warms up
MOST_SAMPLES = 2000


@dataclass(frozen=True)
class Timing:
    """Nanoseconds of every call; what one must move and compute, and its sizes."""

    nanoseconds: Array
    cost: Cost
    sizes: dict[str, int]

    def us(self, quantile: float) -> float:
        return float(np.quantile(self.nanoseconds, quantile)) / 1e3


class FamilyBench:
    """One family's calls in one program, on weights that are drawn once and packed anew for each call.

    Args:
        shapes: all that will be timed.
        cold_bytes: what calls touch before one touches the same again; None: twice the last-level cache.
    """

    def __init__(
        self,
        family: Family,
        shapes: tuple[StepShape, ...],
        options: CpuOptions,
        cold_bytes: int | None = None,
    ) -> None:
        self.family = family
        self._options = options
        self._rng = np.random.default_rng(SEED)
        cold = 2 * last_level_cache() if cold_bytes is None else cold_bytes
        self._sizes = _pool_sizes(family, shapes, cold)
        self._pages = Pages(self._rng.permutation(self._sizes.get("N", 0)), self._sizes.get("S", 1))
        # What each call has of its own: rows of one table, weights, or pages.
        moving = {"ids", "block_table"} & set(family.dtypes)
        self._own = frozenset(moving or family.weights)
        self.calls = CALLS if moving or not family.weights else _copies(family, cold)
        self._program = self._repeated()
        states = {t.name: self._state(t) for t in self._program.tensors(Kind.STATE)}
        self._backend = CpuBackend(self._weights(), replace(options, timing=True))
        try:
            self._executor = self._backend.prepare(self._program, states, largest_of(shapes))
        except BaseException:
            self._backend.close()
            raise

    def close(self) -> None:
        self._backend.close()

    def time(self, shape: StepShape, options: Options, seconds: float = SECONDS) -> Timing:
        """Runs the program until there are samples enough."""
        arrays = case(self.family, shape, options, SEED, MOST_IDS).arrays
        fixed = staged_inputs(self.family.spec, arrays)
        for name in (*self._own, "slots"):
            fixed.pop(name, None)
        env = shape.env | dict.fromkeys("JEUO", 0)
        lead = len(self._program.calls) - self.calls + 1  # staging, and a call that finds threads asleep
        samples: list[int] = []
        started, turn = time.perf_counter(), 0
        while turn < 2 or (time.perf_counter() - started < seconds and len(samples) < MOST_SAMPLES):
            self._executor.reset_timings()
            self._executor.run(fixed | self._moving(shape, turn), env)
            if turn:
                samples += [ns for _, ns in self._executor.timings()[lead:]]
            turn += 1
        last = self._program.calls[-1]
        return Timing(np.array(samples), last.cost(env), last.sizes(env))

    def check(self, shape: StepShape, options: Options) -> Report:
        """The op at this shape against its reference; of a vocabulary, the first MOST_IDS rows."""
        int8 = self._options.activation == "int8"
        stored = {n: d for n, d in self.family.formats.items() if d != "f32"}
        return check_case(
            self.family.spec,
            case(self.family, shape, options, SEED, MOST_IDS),
            through_program(self._once),
            arithmetic=arithmetic_of(self.family.spec, self.family.dtypes, int8),
            dtypes=stored,
        )

    def _once(
        self,
        program: Program,
        weights: Mapping[str, RawWeight],
        states: Arrays,
        inputs: Arrays,
        sizes: Sizes,
    ) -> Arrays:
        """One step of a program; `states` are in the reference's order and are updated in place."""
        held = {k: kv.from_reference(a) if k == "kv" else a for k, a in states.items()}
        backend = CpuBackend(weights, self._options)
        try:
            executor = backend.prepare(program, held, {a: sizes.get(a, 0) for a in "TRL"})
            outputs = {k: a.copy() for k, a in executor.run(inputs, sizes).items()}
        finally:
            backend.close()
        if "kv" in states:
            states["kv"][...] = kv.to_reference(held["kv"])
        return outputs

    def _repeated(self) -> Program:
        layers = self._sizes.get("Y", 1)
        attrs = [
            self.family.attrs | ({"layer": i % layers} if "layer" in self.family.attrs else {})
            for i in range(self.calls)
        ]
        return many_calls(self.family.spec, self._sizes, self.family.dtypes, attrs, self._own)

    def _weights(self) -> dict[str, RawWeight]:
        """One drawn matrix an operand; its calls pack copies of it."""
        drawn = {}
        for t in self._program.tensors(Kind.WEIGHT):
            operand = t.name.split(".")[0]
            if operand not in drawn:
                n, k = t.sizes({})
                drawn[operand] = raw_weight(t.dtype, normal(self._rng, (n, k)) * np.float32(k**-0.5))
        return {t.name: drawn[t.name.split(".")[0]] for t in self._program.tensors(Kind.WEIGHT)}

    def _state(self, t: Tensor) -> Array:
        """A KV pool in any order, or token histories."""
        if t.dtype == "i32":
            return i32(self._rng.integers(0, self._sizes.get("V", 1), t.sizes({})))
        return np.resize(normal(self._rng, (1 << 20,)), t.sizes({})).astype(NUMPY[t.dtype])

    def _moving(self, shape: StepShape, turn: int) -> Arrays:
        """Inputs that differ from call to call or from program to program."""
        inputs: Arrays = {}
        if "slots" in self.family.dtypes:
            inputs["slots"] = step_inputs(self.family, shape, self._pages, turn)["slots"]
        for i in range(self.calls):
            if "ids" in self._own:
                inputs[f"ids.{i}"] = i32(self._rng.integers(0, self._sizes["V"], shape.env["T"]))
            if "block_table" in self._own:
                layers = self._sizes["Y"]
                table = self._pages.table(shape, (turn * self.calls + i) // layers)
                inputs[f"block_table.{i}"] = np.zeros((shape.rows, self._sizes["W"]), np.int32)
                inputs[f"block_table.{i}"][:, : table.shape[1]] = table
        return inputs


def _pool_sizes(family: Family, shapes: tuple[StepShape, ...], cold: int) -> dict[str, int]:
    """Fixed sizes of a program for all of these shapes."""
    widest = max(shapes, key=lambda s: (s.rows, s.context))
    sizes = sizes_of(family, widest)
    if family.paged:
        layers = min(POOL_LAYERS, family.axes["Y"])
        block = 2 * sizes["G"] * sizes["S"] * sizes["D"] * FORMATS[family.dtypes["kv"]][1]
        need = max(s.rows * blocks_of(s, sizes["S"]) for s in shapes)
        sizes |= {"Y": layers, "N": max(need, -(-cold // (layers * block)))}
        sizes["W"] = max(blocks_of(s, sizes["S"]) for s in shapes)
    return sizes


def _copies(family: Family, cold: int) -> int:
    """Calls whose weights are `cold` bytes together: at least 3."""
    each = 0
    for o in family.spec.operands:
        if o.role is Role.WEIGHT and o.name in family.dtypes:
            elements, nbytes = FORMATS[family.dtypes[o.name]]
            each += family.axes[o.axes[0]] * family.axes[o.axes[1]] // elements * nbytes
    return min(max(3, -(-cold // each)), MOST_CALLS)
