"""Runs one call, or one step of a model, on the GPU in memory that was filled with NaN before."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pegainfer.lower.cuda.backend import CudaBackend
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.lower.cuda.options import CudaOptions
from pegainfer.ops.check import Trial, through_program
from pegainfer.ops.program import Program
from pegainfer.ops.rounding import rounded as rounded
from pegainfer.ops.spec import Arrays
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.bf16 import to_bf16
from pegainfer.runtime.cuda.tensor import DeviceTensor, encode
from pegainfer.runtime.weights.weight import Weight, in_memory

Array = np.ndarray[Any, Any]
POISON = 0xFF  # as floats of any width: NaN
EAGER = CudaOptions(graphs=False, tune=False)
# Set it where every access is watched (compute-sanitizer): all kernels, at sizes that end in minutes.
SMALL = "PEGAINFER_SMALL_SHAPES"
T = TypeVar("T")


def sized(true: T, small: T) -> T:
    """True sizes, or small ones where the environment has SMALL."""
    return small if os.environ.get(SMALL) else true


def poison(ctx: CudaContext, executor: CudaExecutor) -> None:
    """Fills buffers, outputs, scratch and what ops keep for each other with NaN."""
    for memory in (executor._arena, executor._scratch, *executor._kept.values()):
        ctx.stream.fill(memory.address, POISON, memory.nbytes)


def run_once(
    ctx: CudaContext,
    program: Program,
    weights: Mapping[str, Weight],
    states: Arrays,
    inputs: Arrays,
    sizes: Mapping[str, int],
) -> dict[str, Array]:
    """One step, run twice on the same states: the outputs must be equal bit by bit.

    States are written back, bf16 as float32.
    """
    largest = {k: n + 3 if k in ("T", "R", "L") else n for k, n in sizes.items()}
    backend = CudaBackend(ctx, weights, EAGER)
    dtypes = {t.name: t.dtype for t in program.tensors(Kind.STATE)}
    held = {k: DeviceTensor.from_numpy(a, dtypes[k], ctx.stream) for k, a in states.items()}
    executor = backend.prepare(program, held, largest)
    backend.load()
    executor.explain({**largest, **sizes})  # lowers the step, so that its scratch exists
    outputs: list[dict[str, Array]] = []
    for _ in range(2):
        poison(ctx, executor)
        for k, a in states.items():
            write(ctx, held[k], a)
        outputs.append({k: t.numpy(ctx.stream) for k, t in executor.run(inputs, sizes).items()})
    for k, a in outputs[0].items():
        assert a.tobytes() == outputs[1][k].tobytes(), f"{program.name}: {k} differs from run to run"
    for k, a in states.items():
        a[...] = held[k].numpy(ctx.stream)
    return outputs[0]


def write(ctx: CudaContext, tensor: DeviceTensor, values: Array) -> None:
    """Copies values into a tensor's memory."""
    host = encode(values, tensor.dtype)
    ctx.stream.upload(tensor.address, host.ctypes.data, host.nbytes, tensor)
    ctx.stream.synchronize(tensor)


def runner(ctx: CudaContext) -> Callable[[Trial], None]:
    """A `run` for ops.check.check_case."""
    return through_program(partial(run_once, ctx))


def raw(a: Array, format: str) -> Weight:
    """A weight as a file holds it: f32, f16 or bf16."""
    plain = np.ascontiguousarray(a, np.float32)
    data = to_bf16(plain) if format == "bf16" else plain.astype({"f32": "<f4", "f16": "<f2"}[format])
    return in_memory(format, a.shape, data.reshape(-1).view(np.uint8))
