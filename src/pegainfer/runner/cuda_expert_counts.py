"""Tokens that each expert of each layer was given, counted on a GPU and read rarely."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from pegainfer.contract.experts import ExpertTokens
from pegainfer.ops.expert_counts import Choices
from pegainfer.runner.parts import Parts
from pegainfer.runtime.cuda.launch import Launch, i32, ptr
from pegainfer.runtime.cuda.module import Kernel
from pegainfer.runtime.cuda.tensor import DeviceTensor

PERIOD = 1.0  # seconds between two reads that wait for steps in flight
THREADS = 256


class CudaExpertCounts:
    """Totals since the start. `add` is called by the runner's thread; `tokens` may be called from any."""

    def __init__(
        self,
        choices: Sequence[Choices],
        parts: Parts,
        kernel: Callable[[str], Kernel],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            choices: at least one, each among as many experts: outputs of the forward pass.
            kernel: a compiled kernel by name.
        """
        self._choices, self._parts, self._clock = choices, parts, clock
        self._kernel = kernel("count_experts")
        outputs = parts.forward.outputs({s: 1 for s in "TRL"})
        found = [outputs[c.output] for c in choices]
        self._chosen = found[0].shape[1]
        addresses = np.array([t.address for t in found], np.uint64)
        self._table = DeviceTensor.from_numpy(addresses, "u64", parts.stream, "where choices of experts lie")
        self._read = np.zeros((len(choices), choices[0].num_experts), np.int64)
        self._totals = DeviceTensor.from_numpy(self._read, "i64", parts.stream, "tokens of experts")
        self._launch: Launch | None = None  # of the step before, which had so many tokens
        self._counted = 0
        self._read_at = -PERIOD
        self._behind = False  # whether steps were counted since the last read

    def add(self, tokens: int) -> None:
        """Counts the first `tokens` of the step whose forward pass was launched last."""
        if self._launch is None or self._counted != tokens:
            self._counted, self._launch = tokens, self._launch_of(tokens)
        self._launch(self._parts.stream)
        self._behind = True

    def _launch_of(self, tokens: int) -> Launch:
        layers, experts = self._read.shape
        args = [
            ptr(self._totals.address), ptr(self._table.address), i32(tokens), i32(self._chosen), i32(experts)
        ]  # fmt: skip
        return Launch(
            self._kernel, (layers, 1, 1), THREADS, args, shared=4 * experts, label="tokens of experts"
        )

    def tokens(self) -> ExpertTokens:
        """The totals; those of some steps ago while steps go on, but not more than PERIOD old."""
        now = self._clock()
        self._parts.device.enter()
        if self._behind and (self._parts.stream.done() or now - self._read_at >= PERIOD):
            self._behind, self._read_at = False, now
            self._read = self._totals.numpy(self._parts.stream)
        layers = tuple(choices.layer for choices in self._choices)
        return ExpertTokens(layers, self._read.shape[1], self._read.astype("<i8").tobytes())
