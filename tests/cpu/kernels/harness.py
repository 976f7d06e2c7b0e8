"""A run of one call on the kernels that also looks where nothing should happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from pegainfer.kernels.cpu.library import supported_isas
from pegainfer.lower.cpu import kv
from pegainfer.lower.cpu.backend import CpuBackend, CpuOptions
from pegainfer.lower.cpu.executor import CpuExecutor
from pegainfer.ops.check import Trial, check_case, suitable_cases, through_program
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Arrays, OpSpec, Role
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]
ISAS = supported_isas()
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_1", "q4_0", "q5_0", "q5_1", "iq4_nl")
WORDS = (
    "int4_g32",
    "int8_g32",
    "fp4_g16",
    "fp4_g32",
    "mxfp4",
    "fp8_g32",
)  # float32 words beside their levels
WIDE_GROUPS = ("int4_g64", "int4_g128", "int8_g64", "int8_g128", "fp8_g64", "fp8_g128")
SUPERBLOCKS = ("q4_k", "q5_k", "q6_k", "q2_k", "q3_k", "iq4_xs")  # of 256 columns
TABLES = (*WORDS, *WIDE_GROUPS, "iq4_nl", "iq4_xs", "q2_k", "q3_k")  # csrc/isa/groups.h
QUANTISED = (
    "q8_0", "q4_1", "q4_0", "q5_0", "q5_1", "iq4_nl", *WORDS, "int4_g128", "int8_g64", "fp8_g128",
    *SUPERBLOCKS,
)  # fmt: skip
POISON = 0xFF  # as floats: NaN


def check(
    spec: OpSpec,
    run: Callable[[Trial], None],
    arithmetic: str = "f32",
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Asserts that all the op's cases that these dtypes can hold run as the reference says."""
    faults, count = [], 0
    for case in suitable_cases(spec, crc32(spec.name.encode()), dtypes):
        report = check_case(spec, case, run, arithmetic=arithmetic, dtypes=dtypes)
        faults += [f"{report.label}: {fault}" for fault in report.faults]
        count += 1
    assert count, f"{spec.name} has no case for {dtypes}"
    assert not faults, "\n".join(faults)


def weights_in(spec: OpSpec, dtype: str) -> dict[str, str]:
    return {o.name: dtype for o in spec.operands if o.role is Role.WEIGHT}


def runner(options: CpuOptions) -> Callable[[Trial], None]:
    """A `run` for ops.check.check_case."""
    return through_program(partial(run_poisoned, options))


def run_poisoned(
    options: CpuOptions,
    program: Program,
    weights: Mapping[str, Weight],
    states: Arrays,
    inputs: Arrays,
    sizes: Mapping[str, int],
) -> dict[str, Array]:
    """One step in an arena of NaN that has room for more rows than the step; copies of the outputs.

    `states` are in the reference's order and are updated in place. Asserts that the room stays untouched.
    """
    largest = {k: n + 3 if k in ("T", "R", "L") else n for k, n in sizes.items()}
    held = {k: kv.from_reference(a) if k == "kv" else a for k, a in states.items()}
    backend = CpuBackend(weights, options)
    try:
        executor = backend.prepare(program, held, largest)
        for memory in executor._memory.values():
            memory.view(np.uint8)[...] = POISON
        outputs = {k: a.copy() for k, a in executor.run(inputs, sizes).items()}
        for name in outputs:
            memory = executor._memory[executor._outputs[name]].view(np.uint8)
            rest = memory[outputs[name].nbytes :]
            strayed = (rest != POISON) & ~_shared(executor, memory)[outputs[name].nbytes :]
            assert not strayed.any(), f"{name} was written past its {outputs[name].shape}"
    finally:
        backend.close()
    for k, a in states.items():
        a[...] = kv.to_reference(held[k]) if k == "kv" else held[k]
    return outputs


def _shared(executor: CpuExecutor, memory: Array) -> Array:
    """Which bytes of a tensor's memory another buffer has had in its own time: [nbytes] bool."""
    shared = np.zeros(memory.nbytes, bool)
    start = memory.ctypes.data
    for other in executor._memory.values():
        at = other.ctypes.data - start
        if at or other.nbytes != memory.nbytes:
            shared[max(0, at) : max(0, at + other.nbytes)] = True
    return shared
