"""Finds where a model goes wrong: each op of a step against its reference on the device's own inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.executor import CudaExecutor
from pegainfer.ops.compose import run_reference
from pegainfer.ops.float8 import LEAST, STEP
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import Role
from pegainfer.ops.stored import plain
from pegainfer.ops.tensor import Kind, Sizes

Array = np.ndarray[Any, Any]
WRITTEN = (Role.OUT, Role.INOUT, Role.STATE)


@dataclass(frozen=True)
class Difference:
    """One output of one call; of a state, what either side has changed.

    Args:
        relative: |got - want| over |want|, both as vectors; NaN where one has NaN and the other has not.
        largest: the greatest |got - want|.
    """

    index: int  # of the call in the program
    call: OpCall
    operand: str
    relative: float
    largest: float
    launches: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.index}: {self.call}: {self.operand} off by {self.relative:.2e} ({self.largest:.3g})"


def compare_step(
    executor: CudaExecutor,
    ctx: CudaContext,
    constants: Mapping[str, Array],
    inputs: Mapping[str, Array],
    env: Sizes,
) -> list[Difference]:
    """Runs a step op by op; every op gets what the device has computed so far, so errors do not add up.

    Args:
        constants: weights as float32 by name; rounded to 16 bits as the device has them, or not.

    States are changed as the step changes them; whole states are copied to the host for each call.
    """
    found: list[Difference] = []
    for index, (call, work, run) in enumerate(executor.walk(inputs, env)):
        roles = {o.name: o.role for o in call.spec.operands}

        def read(name: str, call: OpCall = call) -> Array:
            t = call.tensors[name]
            if t.kind is Kind.WEIGHT:
                return constants[t.name].copy()
            held = executor.tensor(t, env).numpy(ctx.stream)
            return held.astype(np.float32) if t.dtype == "f16" else held  # bf16 comes as float32

        arrays = {name: read(name) for name in call.tensors}
        before = {name: arrays[name].copy() for name in call.tensors if roles[name] is Role.STATE}
        run_reference(call.spec, call.sizes(env), arrays, call.attrs)
        run()
        for name in call.tensors:
            if roles[name] in WRITTEN:
                got, want = read(name), arrays[name]
                if name in before:
                    changed = (got != before[name]) | (want != before[name])
                    got, want = got[changed], want[changed]
                if want.dtype == np.uint8:
                    got, want = _beyond_rounding(got, want)
                relative, largest = difference(got, want)
                found.append(Difference(index, call, name, relative, largest, tuple(map(str, work))))
    return found


def _beyond_rounding(got: Array, want: Array) -> tuple[Array, Array]:
    """Values of an 8-bit cache; one that is next to the reference's was rounded to the other side."""
    g, w = plain(got), plain(want)
    near = np.abs(g - w) <= STEP * np.abs(w) + LEAST
    return np.where(near, w, g), w


def difference(got: Array, want: Array) -> tuple[float, float]:
    """(relative error of the whole, greatest error of an element); NaN equals NaN."""
    g, w = got.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    same = (g == w) | (np.isnan(g) & np.isnan(w))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, g - w)
    known = np.where(np.isfinite(w), w, 0.0)
    norm = float(np.linalg.norm(known))
    total = float(np.linalg.norm(error))
    relative = 0.0 if total == 0 else total / norm if norm else float("inf")
    return relative, float(np.max(np.abs(error), initial=0.0))
