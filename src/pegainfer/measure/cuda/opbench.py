"""Times ops on the GPU as a step meets them: call after call in one graph, weights and pages cold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.bind import Matmul, Work
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.lowering import keeps_whole
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.lower.cuda.store import Dummy, fill_normal
from pegainfer.measure.cuda.roofline import measure_roofline
from pegainfer.measure.cuda.sampling_check import SamplingCheck
from pegainfer.measure.cuda.stepbench import CudaSteps
from pegainfer.measure.cuda.timing import graph_times
from pegainfer.measure.ledger import Roofline, memory_of
from pegainfer.measure.opbench import MOST_IDS, Identity, Repeated, StepTimes, Timing, paged_calls
from pegainfer.measure.step_shapes import GPU_STEP_SIZES, StepShape
from pegainfer.measure.workload import Family, FamilyKey, blocks_of, families
from pegainfer.ops.cases.common import i32, normal
from pegainfer.ops.check import Report
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Arrays, Role, Settings
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.bf16 import from_bf16, to_bf16
from pegainfer.runtime.cuda.launch import Launch
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.weights.weight import in_memory

Array = np.ndarray[Any, Any]

DTYPE = "bf16"  # of activations, and so of weights
COLD = 2  # times the L2 cache
LEAST, PLAIN = 8, 64  # calls of a program: with large weights, and without weights
REPLAYS = 20  # of a shape's graph
COLUMN_AXES, COLUMNS = "VNF", 512  # of a result that a check compares, where columns are a matrix's rows
LIBRARY = "cublaslt"
KV_BLOCK = 16  # tokens, at the least
PERIOD = (1 << 20) + 7  # drawn weights repeat after this many elements; no matrix has rows of this length


class CudaOps:
    """One GPU: implements measure.opbench.OpDevice."""

    step_sizes = GPU_STEP_SIZES
    threads = 0

    def __init__(self, ordinal: int = 0, ctx: CudaContext | None = None) -> None:
        """Raises CudaError without a usable GPU, KernelsError without kernels for it."""
        self._ctx = ctx or CudaContext(ordinal)
        self.name = self._ctx.device.info.name

    def families(self, programs: Iterable[Program]) -> list[Family]:
        """Matrices have the activations' dtype, whatever the file has."""
        found = families([program.lowered(keep=keeps_whole) for program in programs])
        return [replace(f, dtypes=f.dtypes | dict.fromkeys(f.weights, DTYPE)) for f in found]

    def bench(self, family: Family, shapes: tuple[StepShape, ...]) -> CudaFamilyBench:
        return CudaFamilyBench(family, shapes, self._ctx)

    def steps(
        self, record: Callable[[int], Program], longest: int, wanted: Collection[FamilyKey]
    ) -> dict[StepShape, StepTimes]:
        sizes = self.step_sizes
        shapes = tuple(s for s in (*sizes.decodes, *sizes.prefills, *sizes.long) if s.context <= longest)
        blocks = max(s.rows * blocks_of(s, KV_BLOCK) for s in shapes)
        bench = CudaSteps(self._ctx, record(blocks), shapes)
        try:
            return {s: bench.time(s, wanted, launched) for s in shapes}
        finally:
            bench.close()

    def roofline(self) -> Roofline:
        return measure_roofline(self._ctx)

    def close(self) -> None:
        self._ctx.close()


class CudaFamilyBench:
    """One family's calls. The first call's weights are drawn on the host, for the check; others on the GPU.

    Args:
        shapes: all that will be timed.
    """

    def __init__(self, family: Family, shapes: tuple[StepShape, ...], ctx: CudaContext) -> None:
        self.family = family
        self._ctx = ctx
        cold = COLD * ctx.device.info.l2_bytes
        plain = max(PLAIN, paged_calls(family, shapes, cold)) if family.paged else PLAIN
        self._repeated = Repeated(family, shapes, cold, least=LEAST, plain=plain)
        self._bits = self._draw()
        raw = {
            name: in_memory(DTYPE, bits.shape, bits.reshape(-1).view(np.uint8))
            for name, bits in self._bits.items()
        }
        self._backend = CudaBackend(ctx, raw, CudaOptions(), Dummy(heads=()))
        states = {t.name: self._state(t) for t in self._repeated.program.tensors(Kind.STATE)}
        self._executor = self._backend.prepare(self._repeated.program, states, self._repeated.largest)
        self._backend.load()
        self._staged: tuple[object, Arrays] = (None, {})

    def close(self) -> None:
        """Device memory goes with the bench; the context stays the device's."""
        self._ctx.stream.synchronize("op bench")
        del self._executor, self._backend

    def time(self, shape: StepShape, options: Settings) -> Timing:
        """Replays a graph of all calls."""
        env, decode = self._repeated.env(shape), self._decodes(shape)
        self._executor.capture(env, decode, graph=False)  # cuBLASLt's algorithms are timed here
        for _, _, run in self._executor.walk(self._inputs(shape, options), env):
            run()
        self._executor.begin(env, decode)  # the walk's launches may have work lists of their own
        calls = [work for _, work in self._calls(shape)]
        launches = [launch for work in calls for launch in work]
        times = graph_times(self._ctx, launches, REPLAYS, f"op bench of {self.family.spec.name}")
        return self._repeated.timing(np.array(times) * 1e3 / len(calls), shape)

    def check(self, shape: StepShape, options: Settings) -> Report:
        """Some rows and columns of the first call against the reference."""
        env, lead = self._repeated.env(shape), self._repeated.lead
        label = f"{shape.rows} rows of {shape.count}, context {shape.context}"
        for number, (call, _, run) in enumerate(self._executor.walk(self._inputs(shape, options), env)):
            if number == lead:
                weights, columns = self._weights(call)
                sampled = SamplingCheck(self._executor, self._ctx, call, env, weights, columns)
                return sampled.check(label, run)
            run()
        raise AssertionError("a program without its op")

    def identity(self, shape: StepShape) -> Identity:
        _, work = self._calls(shape)[0]
        kernels = launched(work, shape.count == 1)
        call = self._repeated.last
        moved = call.cost(self._repeated.env(shape)).bytes
        fits = moved <= self._ctx.device.info.l2_bytes // 2
        return Identity(
            f"cuda.sm{self._ctx.device.info.arch}.{self._format}",
            kernels,
            self._source(kernels),
            "cache" if memory_of(call.spec) == "cache" and fits else "dram",
            self._arithmetic,
        )

    @property
    def _format(self) -> str:
        """What the op computes with; ids alone are whole numbers."""
        used = self.family.dtypes.values()
        return next((dtype for dtype in (DTYPE, "f32") if dtype in used), "i32")

    @property
    def _arithmetic(self) -> str:
        """A key of the peaks."""
        return DTYPE if self._format == DTYPE else "f32"

    def _source(self, kernels: tuple[str, ...]) -> str:
        """Of the units that these kernels are in; the library has no source of ours."""
        found = [self._ctx.library.manifest.variant(name) for name in kernels if name != LIBRARY]
        hashes = sorted({entry[0].hash for entry in found if entry is not None})
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12] if hashes else LIBRARY

    def _calls(self, shape: StepShape) -> list[tuple[OpCall, list[Work]]]:
        work = self._executor.work(self._repeated.env(shape), self._decodes(shape))
        return work[self._repeated.lead :]

    def _decodes(self, shape: StepShape) -> bool:
        """Whether each row decodes a token; the executor decides it from its inputs in the same way."""
        return shape.count == 1 and "query_lens" in self.family.dtypes

    def _inputs(self, shape: StepShape, options: Settings) -> Arrays:
        key = shape, tuple(options.items())
        if self._staged[0] != key:
            fixed = self._repeated.fixed(shape, options)
            self._staged = key, fixed | self._repeated.moving(shape, 0)
        return self._staged[1]

    def _draw(self) -> dict[str, Array]:
        """Bits of the first call's matrices by the tensors' names."""
        first = self._repeated.program.calls[self._repeated.lead]
        drawn = {}
        for o in first.spec.operands:
            if o.role is Role.WEIGHT and o.name in first.tensors:
                n, k = first.tensors[o.name].sizes({})
                values = normal(self._repeated.rng, (min(PERIOD, n * k),)) * np.float32(k**-0.5)
                drawn[first.tensors[o.name].name] = np.resize(to_bf16(values), (n, k))
        return drawn

    def _weights(self, call: OpCall) -> tuple[Arrays, Arrays]:
        """Float32 by operand, and which rows those are by axis letter (SamplingCheck)."""
        weights: Arrays = {}
        columns: Arrays = {}
        for o in call.spec.operands:
            if o.role is Role.WEIGHT and o.name in call.tensors:
                bits = self._bits[call.tensors[o.name].name]
                if o.axes[0] in COLUMN_AXES:
                    columns[o.axes[0]] = self._chosen(len(bits))
                    bits = bits[columns[o.axes[0]]]
                weights[o.name] = from_bf16(bits)
        return weights, columns

    def _chosen(self, rows: int) -> Array:
        """All that ids of the first call may name; else COLUMNS of them, from the first to the last."""
        if "ids" in self.family.dtypes:
            return np.arange(min(MOST_IDS, rows))
        return np.unique(np.linspace(0, rows - 1, min(COLUMNS, rows)).astype(np.int64))

    def _state(self, t: Tensor) -> DeviceTensor:
        """A KV pool, or token histories."""
        if t.dtype == "i32":
            ids = i32(self._repeated.rng.integers(0, self._repeated.sizes.get("V", 1), t.sizes({})))
            return DeviceTensor.from_numpy(ids, "i32", self._ctx.stream, t.name)
        pool = DeviceTensor.empty(t.sizes({}), t.dtype, t.name)
        fill_normal(self._ctx, pool, seed=1)
        return pool


def launched(work: Iterable[Work], decodes: bool) -> tuple[str, ...]:
    """Each kernel once, in order.

    Without those of decoded rows where each row has several tokens: such a step launches them in vain.
    """
    names = dict.fromkeys(kernel_name(w) for w in work)
    return tuple(n for n in names if decodes or "_decode_" not in n)


def kernel_name(work: Work) -> str:
    """As the manifest has it, or the library's."""
    if isinstance(work, Launch):
        return work.kernel.name
    return LIBRARY if isinstance(work, Matmul) else type(work).__name__
