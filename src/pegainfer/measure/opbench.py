"""The part of the op benches that all devices share: calls of an op repeated in one program with cold weights
and pages, as in a step; timings; and the protocol of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from pegainfer.measure.ledger import Memory, Roofline
from pegainfer.measure.step_shapes import StepShape, StepSizes
from pegainfer.measure.workload import (
    Family,
    FamilyKey,
    Pages,
    blocks_of,
    case,
    largest_of,
    sizes_of,
    step_inputs,
)
from pegainfer.ops.cases.common import i32
from pegainfer.ops.check import Report
from pegainfer.ops.compose import many_calls, staged_inputs
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Arrays, Cost, Role, Settings, state_ids
from pegainfer.ops.tensor import FORMATS

Array = np.ndarray[Any, Any]

SEED = 20240607
CALLS = 32  # a program, where weights do not say otherwise
MOST_CALLS = 400  # of small weights: as many as fill twice a cache of 32 MiB
POOL_LAYERS = 4  # of the KV pool that calls walk through
MOST_IDS = 4096  # of the vocabulary in a check


@dataclass(frozen=True)
class Timing:
    """Nanoseconds a call, sample by sample; what one must move and compute, and its sizes."""

    nanoseconds: Array
    cost: Cost
    sizes: dict[str, int]

    def us(self, quantile: float) -> float:
        return float(np.quantile(self.nanoseconds, quantile)) / 1e3


@dataclass(frozen=True)
class Identity:
    """What was measured, as the ledger identifies it.

    Args:
        kernels: by their names in the manifest, in order; empty where the variant says it all.
        source: hash of their sources.
        memory, arithmetic: which roofs hold for it.
    """

    variant: str
    kernels: tuple[str, ...]
    source: str
    memory: Memory
    arithmetic: str


@dataclass(frozen=True)
class InStep:
    """The cost that one call of an op adds to a whole step of the model.

    Args:
        us: microseconds.
        kernels: that it launches there.
    """

    us: float
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class StepTimes:
    """One step: the forward pass in microseconds, what it must move and compute, and ops by Family.key.

    Args:
        kernels: of a pass that is one launch, which has no ops in it that could be told apart.
    """

    us: float
    cost: Cost
    calls: Mapping[FamilyKey, InStep]
    kernels: tuple[str, ...] = ()


class FamilyBench(Protocol):
    """One family on one device, made for a set of shapes."""

    def time(self, shape: StepShape, options: Settings) -> Timing: ...

    def check(self, shape: StepShape, options: Settings) -> Report: ...

    def identity(self, shape: StepShape) -> Identity: ...

    def close(self) -> None: ...


class OpDevice(Protocol):
    """A device whose ops are benched.

    Args:
        name: of the processor or card.
        threads: that compute; 0 on a GPU.
        step_sizes: those that it is measured at.
    """

    @property
    def name(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def step_sizes(self) -> StepSizes: ...

    def families(self, programs: Iterable[Program]) -> list[Family]:
        """The distinct calls of a model's programs as this device lowers and stores them."""
        ...

    def bench(self, family: Family, shapes: tuple[StepShape, ...]) -> FamilyBench: ...

    def steps(
        self, record: Callable[[int], Program], longest: int, wanted: Collection[FamilyKey]
    ) -> dict[StepShape, StepTimes]:
        """Whole forward passes of the model; None where an op takes the same time in a step as by itself.

        Args:
            record: the forward pass over a KV cache of so many blocks.
            longest: tokens of a sequence.
            wanted: ops whose part is measured.
        """
        ...

    def roofline(self) -> Roofline: ...

    def close(self) -> None: ...


class Repeated:
    """One family's calls in one program.

    Args:
        shapes: all that will be run.
        cold_bytes: what calls touch before one touches the same again.
        least: calls with weights of their own, however large those are.
        plain: calls without.
    """

    def __init__(
        self,
        family: Family,
        shapes: tuple[StepShape, ...],
        cold_bytes: int,
        *,
        least: int = 3,
        plain: int = CALLS,
    ) -> None:
        self.family = family
        self.rng = np.random.default_rng(SEED)
        self.sizes = _pool_sizes(family, shapes, cold_bytes)
        self.pages = Pages(self.rng.permutation(self.sizes.get("N", 0)), self.sizes.get("S", 1))
        # Each call has its own rows of a table, weights or pages.
        moving = {"ids", "block_table"} & set(family.dtypes)
        self.own = frozenset(moving or family.weights)
        self.calls = plain if moving or not family.weights else _copies(family, cold_bytes, least)
        self.program = self._program()
        self.largest = largest_of(shapes)

    @property
    def lead(self) -> int:
        """Calls of the program before the op's own: they stage what it writes in place."""
        return len(self.program.calls) - self.calls

    @property
    def last(self) -> OpCall:
        return self.program.calls[-1]

    def env(self, shape: StepShape) -> dict[str, int]:
        return shape.env | dict.fromkeys("JEUO", 0)

    def fixed(self, shape: StepShape, options: Settings) -> Arrays:
        """Inputs that all calls share, in every run."""
        drawn = case(self.family, shape, options, SEED, MOST_IDS, only=(Role.IN, Role.INOUT))
        inputs = staged_inputs(self.family.spec, drawn.arrays)
        for name in (*self.own, "slots"):
            inputs.pop(name, None)
        return inputs

    def moving(self, shape: StepShape, iteration: int) -> Arrays:
        """Inputs that differ from call to call or from run to run."""
        inputs: Arrays = {}
        if "slots" in self.family.dtypes:
            inputs["slots"] = step_inputs(self.family, shape, self.pages, iteration)["slots"]
        for i in range(self.calls):
            if "ids" in self.own:  # those of the first call are such that a check can have the whole table
                most = self.sizes["V"] if i else min(self.sizes["V"], MOST_IDS)
                inputs[f"ids.{i}"] = i32(self.rng.integers(0, most, shape.env["T"]))
            if "block_table" in self.own:
                layers = self.sizes["Y"]
                table = self.pages.table(shape, (iteration * self.calls + i) // layers)
                inputs[f"block_table.{i}"] = np.zeros((shape.rows, self.sizes["W"]), np.int32)
                inputs[f"block_table.{i}"][:, : table.shape[1]] = table
        return inputs

    def timing(self, nanoseconds: Array, shape: StepShape) -> Timing:
        env = self.env(shape)
        return Timing(nanoseconds, self.last.cost(env), self.last.sizes(env))

    def _program(self) -> Program:
        layers = self.sizes.get("Y", 1)
        attrs = [
            self.family.attrs | ({"layer": i % layers} if "layer" in self.family.attrs else {})
            for i in range(self.calls)
        ]
        return many_calls(self.family.spec, self.sizes, self.family.dtypes, attrs, self.own)


def paged_calls(family: Family, shapes: tuple[StepShape, ...], cold_bytes: int) -> int:
    """Calls of attention that read `cold_bytes` of pages together, at the least of the shapes."""
    return -(-cold_bytes // (min(s.rows * s.context for s in shapes) * _token_bytes(family)))


def _token_bytes(family: Family) -> int:
    """What a token has in the cache of one layer."""
    axes = [a for a in family.spec.operand("kv").axes if a not in "NYS"]
    values = prod(int(a) if a.isdigit() else family.axes[a] for a in axes)
    return values * FORMATS[family.dtypes["kv"]][1]


def _pool_sizes(family: Family, shapes: tuple[StepShape, ...], cold: int) -> dict[str, int]:
    """Fixed sizes of a program for all of these shapes."""
    widest = max(shapes, key=lambda s: (s.rows, s.context))
    sizes = sizes_of(family, widest)
    if family.paged:
        layers = min(POOL_LAYERS, family.axes["Y"])
        block = sizes["S"] * _token_bytes(family)
        need = max(s.rows * blocks_of(s, sizes["S"]) for s in shapes)
        sizes |= {"Y": layers, "N": max(need, -(-cold // (layers * block)))}
        sizes["W"] = max(blocks_of(s, sizes["S"]) for s in shapes)
    elif state_ids(family.spec) is not None:
        sizes["N"] = max(s.rows for s in shapes)
    if "history" in family.dtypes:
        sizes |= {"Z": max(s.rows for s in shapes), "X": max(s.context for s in shapes) + 1}
    return sizes


def _copies(family: Family, cold: int, least: int) -> int:
    """Calls whose weights are `cold` bytes together."""
    each = 0
    for o in family.spec.operands:
        if o.role is Role.WEIGHT and o.name in family.dtypes:
            elements, nbytes = FORMATS[family.dtypes[o.name]]
            each += prod(family.axes[a] for a in o.axes) // elements * nbytes
    return min(max(least, -(-cold // each)), MOST_CALLS)
