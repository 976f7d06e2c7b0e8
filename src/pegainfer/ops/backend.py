"""What a model line needs of a backend: programs made ready to run over weights that were packed once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from pegainfer.ops.program import Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.tensor import Sizes
from pegainfer.runtime.weights.weight import Weight

Array = np.ndarray[Any, Any]


class Executor(Protocol):
    """A recorded program, ready to run."""

    def run(self, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, Array]:
        """One step: writes states in place and returns the outputs, valid until the next run."""


class Backend(Protocol):
    """Owns a model's weights in its own layout."""

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> Executor:
        """Makes a program ready.

        Args:
            states: arrays by name; a backend may order what lies within one block of a KV cache.
            largest: the step sizes that the arena must hold.
        """

    def close(self) -> None: ...


class ReferenceBackend:
    """The ops' NumPy references on float32 weights: what every other backend is compared with."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._constants = {name: w.values() for name, w in weights.items()}

    def prepare(self, program: Program, states: Mapping[str, Array], largest: Sizes) -> ReferenceExecutor:
        return ReferenceExecutor(program, {**self._constants, **states})

    def close(self) -> None:
        self._constants.clear()
