"""What the engine records of each step while a trace is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

# What the engine's thread does between two results, in the order in which it does it.
STAGES = ("commit", "emit", "other", "schedule", "launch", "mask", "wait")


class StepTrace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One committed step. Durations are seconds.

    The host's stages are those between the end of the step before and the end of this one, so that they add
    up to `period`: with two plans in flight, part of them prepared the step after this one.
    """

    step: int
    ended: float  # CLOCK_MONOTONIC seconds when the host had the result
    period: float  # since the end of the step before, or since the engine had work again
    device: float  # wall time on the device
    price: float  # what `device` should be at measured prices; 0: not known yet
    decode_price: float  # the part of `price` that the decode rows alone would take
    stages: tuple[float, ...]  # one for each of STAGES
    stage: float  # part of this step's launch: turning the plan into the device's arrays
    # Part of this step's launch, which may lie in the period before: making a graph of its sizes.
    cold: float
    collect: float  # garbage collection, on any thread of the engine's process
    # Time that threads of the process could have run, but had no processor, summed: of steps that took longer
    # than their price, in the last 0.1 s at most; 0 of others.
    starved: float
    decode_rows: int
    prefill_rows: int
    prefill_tokens: int
    context: int  # positions that the decode rows read, summed
    running: int  # sequences with a slot
    waiting: int  # sequences without one
    loading: int  # of these, sequences whose prefix is being loaded from a lower tier
    free_blocks: int
    preempted: int  # sequences that lost their blocks since the step before
    # Seconds by op, of sampled steps; a program that ended early may have brought those of the step after.
    ops: dict[str, float] = {}


class OpTimes(Protocol):
    """Times the ops of sampled steps."""

    def switch(self, on: bool) -> None:
        """Begins or ends sampling."""

    def take(self) -> dict[str, float]:
        """Seconds by op since the last call; empty where no sampled step has ended since."""


StepSink = Callable[[list[StepTrace]], None]  # must not block
