"""What each op takes in sampled steps of a running engine, for its trace."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.measure.profile import Profiler, Timed, op_label
from pegainfer.ops.tensor import Sizes

PERIOD = 16  # of this many forward passes one is sampled, with what runs until the next

Array = np.ndarray[Any, Any]


class OpTimes(Profiler):
    """Implements contract.trace.OpTimes. `note` is called by the computing thread, the others by another."""

    def __init__(self, period: int = PERIOD) -> None:
        super().__init__()
        self._period = period
        self._on = False
        self._passes = 0
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def switch(self, on: bool) -> None:
        """Begins or ends sampling."""
        self._on = on

    def take(self) -> dict[str, float]:
        """Seconds by op since the last call; nothing where no sampled program has ended since."""
        if not self._seconds:
            return {}
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def note(self, executor: Timed, inputs: Mapping[str, Array], env: Sizes) -> Mapping[str, Array]:
        """Runs a program once."""
        if not self._on:
            return executor.run(inputs, env)
        self._passes += "C" in env  # only a forward pass counts cached tokens
        if self._passes % self._period:
            return executor.run(inputs, env)
        executor.reset_timings()
        outputs = executor.run(inputs, env)
        with self._lock:
            for call, nanoseconds in executor.timings():
                name = op_label(call)
                self._seconds[name] = self._seconds.get(name, 0.0) + nanoseconds / 1e9
        return outputs
