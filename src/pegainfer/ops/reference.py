"""Executes a recorded program with the ops' NumPy references, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.tensor import NUMPY, Kind, Sizes, Tensor

Array = np.ndarray[Any, Any]
Watch = Callable[[OpCall, Mapping[str, Array]], None]


class ReferenceExecutor:
    """Holds weights and states as plain arrays and runs a program on them.

    Args:
        program: coarse calls are lowered.
        constants: weights as float32 and states in the reference's layout, by tensor name.
    """

    def __init__(self, program: Program, constants: Mapping[str, Array]) -> None:
        self.program = program.lowered(keep=lambda call: False)
        self.constants = dict(constants)
        for t in self.program.tensors(Kind.WEIGHT, Kind.STATE):
            if t.name not in self.constants:
                raise OpError(f"program {program.name}: no array for {t}")

    def run(self, inputs: Mapping[str, Array], env: Sizes, watch: Watch | None = None) -> dict[str, Array]:
        """One step. Writes states in place; returns the outputs by name.

        Args:
            watch: called after every call with its arrays (to compare with a device, op by op).
        """
        arrays: dict[str, Array] = {**self.constants, **inputs}
        for t in self.program.tensors(Kind.BUFFER, Kind.OUTPUT):
            # All bits set, NaN as a float, shows what a reference leaves unwritten.
            unwritten = np.full(t.nbytes(env), 0xFF, np.uint8)
            arrays[t.name] = unwritten.view(NUMPY[t.dtype]).reshape(t.sizes(env))
        for call in self.program.calls:
            bound = {k: self._shaped(arrays, t, env) for k, t in call.tensors.items()}
            assert call.spec.reference is not None
            call.spec.reference(**bound, **call.attrs)
            if watch is not None:
                watch(call, bound)
        return {t.name: arrays[t.name] for t in self.program.tensors(Kind.OUTPUT)}

    def _shaped(self, arrays: Mapping[str, Array], t: Tensor, env: Sizes) -> Array:
        if t.name not in arrays:
            raise OpError(f"program {self.program.name}: no array for {t.kind} {t}")
        a = arrays[t.name]
        return a if t.kind in (Kind.WEIGHT, Kind.STATE) else a.reshape(t.sizes(env))
