"""The launches of a step before they have addresses. They are made and printed without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Sizes, Tensor
from pegainfer.runtime.cuda.cublaslt import MatmulProblem
from pegainfer.runtime.cuda.launch import Arg
from pegainfer.runtime.cuda.layout import Layout

# Kinds of device memory, before any is allocated


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights as one matrix in a layout of WeightStore."""

    tensors: tuple[Tensor, ...]
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of FP8 weights as one matrix in a layout of WeightStore."""

    tensors: tuple[Tensor, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of such weights."""

    tensors: tuple[Tensor, ...]
    layout: str


@dataclass(frozen=True, slots=True)
class Packed:
    """Quantised weights as one matrix. `form`: a key of runtime.cuda.packed.FORMS."""

    tensors: tuple[Tensor, ...]
    form: str
    layout: str


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weight or a table, in float32."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one op, free again when the op has ended."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The context's counters, zero before a launch and after it."""


@dataclass(frozen=True, slots=True)
class Control:
    """A rank's view of its group; see runtime/cuda/peers.py."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory that lives as long as the step; equal names share it.

    Args:
        zeroed: holds zeros when the step is bound.
    """

    name: str
    nbytes: int
    zeroed: bool = False


Held = Tensor | Matrix | Codes | Scales | Packed | Vector | Scratch | Arrivals | Control | StepMemory
SCRATCH, ARRIVALS, CONTROL = Scratch(), Arrivals(), Control()


@dataclass(frozen=True, slots=True)
class Place:
    """An address to be: so many bytes behind the start of what is held."""

    held: Held
    offset: int = 0

    def __add__(self, nbytes: int) -> Place:
        return Place(self.held, self.offset + nbytes)


# Arguments


@dataclass(frozen=True, slots=True)
class Struct:
    """A struct passed by value, laid out as C does.

    Args:
        kinds: of its fields, as Arg has them.
        values: numbers, and places that become addresses.
    """

    kinds: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Boxes:
    """A TMA descriptor: TensorMap.of's arguments, with a place for the address."""

    place: Place
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    box: tuple[int, ...]
    promotion: int = 128


PlannedArg = Arg | Struct | Boxes


def ptr(place: Place | None) -> Arg:
    """A device address; None is a null pointer."""
    return Arg("ptr", 0 if place is None else place)


def struct(layout: Layout, **members: Any) -> Struct:
    """A struct passed by value; pointers are places. Raises OpError as Layout.values does."""
    return Struct(layout.kinds, layout.values(members))


# Launches


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A kernel, its grid and its arguments.

    Args:
        label: op and axis sizes; launches that differ in it alone are equal.
        why: the reason of this choice.
        pdl: may start before the launch ahead of it has ended.
        cluster: blocks along x that share memory; 0 for none.
        cooperative: blocks wait for each other, so all must run at once.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: int
    args: tuple[PlannedArg, ...]
    label: str = field(compare=False)
    why: str
    shared: int = 0
    pdl: bool = False
    cluster: int = 0
    cooperative: bool = False

    def __str__(self) -> str:
        more = f" cluster {self.cluster}" if self.cluster else ""
        more += " cooperative" if self.cooperative else ""
        return f"{self.kernel} grid {self.grid} block {self.block} shared {self.shared}{more}: {self.why}"


@dataclass(frozen=True, slots=True)
class PlannedMatmul:
    """A GEMM by cuBLASLt, whose algorithm is picked when it is bound."""

    problem: MatmulProblem
    x: Place
    w: Place
    out: Place
    label: str
    why: str

    def __str__(self) -> str:
        return f"cublasLt {self.problem}: {self.why}"


Planned = PlannedLaunch | PlannedMatmul


@dataclass
class StepPlan:
    """All launches of a step of certain sizes.

    Args:
        calls: of the rewritten program, each with its launches.
        replaces: how many calls of the program each of them stands for.
        ahead: launches before those of the first call, each once.
        scratch_bytes: what the most demanding op needs.
        memory: bytes of StepMemory by name, and of tensors that only the rewritten program has.
        zeroed: names of that memory that must hold zeros.
        applied: how often each rewrite rule was used.
        lacking: of rules that were not, the first precondition that did not hold.
    """

    env: Sizes
    decode_only: bool
    calls: list[tuple[OpCall, list[Planned]]] = field(default_factory=list)
    replaces: list[int] = field(default_factory=list)
    ahead: list[PlannedLaunch] = field(default_factory=list)
    scratch_bytes: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    zeroed: set[str] = field(default_factory=set)
    applied: dict[str, int] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> Iterator[Planned]:
        yield from self.ahead
        for _, launches in self.calls:
            yield from launches

    def reserve(self, name: str, nbytes: int) -> None:
        self.memory[name] = max(nbytes, self.memory.get(name, 0))

    def counts(self) -> list[int]:
        """Launches of each call of the program; a call that another one includes has none of its own."""
        counts = []
        for (_, launches), replaced in zip(self.calls, self.replaces, strict=True):
            counts += [len(launches), *[0] * (replaced - 1)]
        return counts

    def __str__(self) -> str:
        lines = [f"{'ahead of the step':50} {launch}" for launch in self.ahead]
        for call, launches in self.calls:
            for i, launch in enumerate(launches):
                lines.append(f"{'' if i else call_label(call, self.env):50} {launch}")
        kind = " decode" if self.decode_only else ""
        return "\n".join([f"step {sizes_text(self.env)}{kind}: {len(lines)} launches", *lines])


def call_label(call: OpCall, env: Sizes) -> str:
    """Op and axis sizes, for errors and listings."""
    numbers = call.sizes(env)
    return " ".join([call.spec.name, *(f"{a}={numbers[a]}" for a in call.axes)])


def sizes_text(env: Mapping[str, int]) -> str:
    return " ".join(f"{k}={v}" for k, v in env.items())
