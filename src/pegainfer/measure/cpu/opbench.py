"""Times ops on the CPU as a step meets them: call after call in one program, weights and pages cold."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.kernels.cpu.library import isa_name, source_hash
from pegainfer.lower.cpu import kv
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.encode import lowered
from pegainfer.measure.cpu.roofline import last_level_cache, measure_roofline
from pegainfer.measure.cpu.variant import activation_on, arithmetic_of, variant_of
from pegainfer.measure.ledger import Roofline, memory_of
from pegainfer.measure.opbench import MOST_IDS, SEED, Identity, Repeated, StepTimes, Timing
from pegainfer.measure.step_shapes import CPU_STEP_SIZES, StepShape
from pegainfer.measure.workload import Family, FamilyKey, case, families
from pegainfer.ops.cases.common import i32, normal
from pegainfer.ops.check import Report, check_case, through_program
from pegainfer.ops.program import Program
from pegainfer.ops.quantize import quantized_weight
from pegainfer.ops.spec import Arrays, Settings
from pegainfer.ops.stored import held
from pegainfer.ops.tensor import Kind, Sizes, Tensor
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]

SECONDS = 0.25  # spent on one shape, after one program that warms up
MOST_SAMPLES = 2000


class CpuOps:
    """This processor: implements measure.opbench.OpDevice."""

    step_sizes = CPU_STEP_SIZES

    def __init__(self, name: str, options: CpuOptions) -> None:
        """`name`: the processor's."""
        self.name = name
        self.threads = options.threads
        self._options = options

    def families(self, programs: Iterable[Program]) -> list[Family]:
        return families([lowered(program) for program in programs])

    def bench(self, family: Family, shapes: tuple[StepShape, ...]) -> FamilyBench:
        return FamilyBench(family, shapes, self._options)

    def steps(
        self, record: Callable[[int], Program], longest: int, wanted: Collection[FamilyKey]
    ) -> dict[StepShape, StepTimes]:
        """None: calls follow each other here, and `bench engine --profile` times them in a step."""
        return {}

    def roofline(self) -> Roofline:
        return measure_roofline(self._options.threads, self._options.isa)

    def close(self) -> None:
        """Nothing is held between benches."""


class FamilyBench:
    """One family's calls, on weights that are drawn once and packed anew for each call.

    Args:
        shapes: all that will be timed.
        cold_bytes: as Repeated's; None: twice the last-level cache.
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
        self._activation = activation_on(options.activation, options.isa)
        self._repeated = Repeated(
            family, shapes, 2 * last_level_cache() if cold_bytes is None else cold_bytes
        )
        self.calls = self._repeated.calls
        states = {t.name: self._state(t) for t in self._repeated.program.tensors(Kind.STATE)}
        self._backend = CpuBackend(self._weights(), replace(options, timing=True))
        try:
            self._executor = self._backend.prepare(self._repeated.program, states, self._repeated.largest)
        except BaseException:
            self._backend.close()
            raise

    def close(self) -> None:
        self._backend.close()

    def identity(self, shape: StepShape) -> Identity:
        spec, dtypes = self.family.spec, self.family.dtypes
        return Identity(
            variant_of(spec, dtypes, isa_name(self._options.isa), self._activation),
            (),
            source_hash()[:12],
            memory_of(spec),
            arithmetic_of(spec, dtypes, self._activation),
        )

    def time(self, shape: StepShape, options: Settings, seconds: float = SECONDS) -> Timing:
        """Runs the program until there are samples enough."""
        fixed, env = self._repeated.fixed(shape, options), self._repeated.env(shape)
        lead = self._repeated.lead + 1  # staging, and a call that finds threads asleep
        samples: list[int] = []
        started, iteration = time.perf_counter(), 0
        while iteration < 2 or (time.perf_counter() - started < seconds and len(samples) < MOST_SAMPLES):
            self._executor.reset_timings()
            self._executor.run(fixed | self._repeated.moving(shape, iteration), env)
            if iteration:
                samples += [ns for _, ns in self._executor.timings()[lead:]]
            iteration += 1
        return self._repeated.timing(np.array(samples), shape)

    def check(self, shape: StepShape, options: Settings) -> Report:
        """The op at this shape against its reference; of a vocabulary, the first MOST_IDS rows."""
        stored = {n: d for n, d in self.family.formats.items() if d != "f32"}
        return check_case(
            self.family.spec,
            case(self.family, shape, options, SEED, MOST_IDS),
            through_program(self._once),
            arithmetic=arithmetic_of(self.family.spec, self.family.dtypes, self._activation),
            dtypes=stored,
        )

    def _once(
        self,
        program: Program,
        weights: Mapping[str, Weight],
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

    def _weights(self) -> dict[str, Weight]:
        """One drawn matrix an operand; its calls pack copies of it."""
        drawn = {}
        for t in self._repeated.program.tensors(Kind.WEIGHT):
            operand = t.name.split(".")[0]
            if operand not in drawn:
                n, k = t.sizes({})
                drawn[operand] = quantized_weight(
                    t.dtype, normal(self._repeated.rng, (n, k)) * np.float32(k**-0.5)
                )
        return {t.name: drawn[t.name.split(".")[0]] for t in self._repeated.program.tensors(Kind.WEIGHT)}

    def _state(self, t: Tensor) -> Array:
        """A KV pool in any order, or token histories."""
        if t.dtype == "i32":
            return i32(self._repeated.rng.integers(0, self._repeated.sizes.get("V", 1), t.sizes({})))
        return np.resize(held(normal(self._repeated.rng, (1 << 20,)), t.dtype), t.sizes({}))
