"""Binding: a plan's places become addresses, its kernels are loaded, cuBLASLt picks its algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pegainfer.lower.cuda.context import CudaContext
from pegainfer.lower.cuda.plan import (
    Arrivals,
    Boxes,
    Codes,
    Control,
    Matrix,
    Packed,
    Place,
    Planned,
    PlannedArg,
    PlannedLaunch,
    Scales,
    Scratch,
    StepMemory,
    Struct,
    Vector,
)
from pegainfer.lower.cuda.store import WeightStore
from pegainfer.ops.tensor import Tensor
from pegainfer.runtime.cuda.cublaslt import MatmulPlan
from pegainfer.runtime.cuda.launch import Arg, Launch, packed_struct
from pegainfer.runtime.cuda.packed import FORMS
from pegainfer.runtime.cuda.stream import Stream


class Work(Protocol):
    """Something that goes on a stream."""

    def __call__(self, stream: Stream) -> None: ...


@dataclass(frozen=True)
class Matmul:
    """A GEMM by cuBLASLt on fixed addresses."""

    plan: MatmulPlan
    x: int
    w: int
    out: int

    def __call__(self, stream: Stream) -> None:
        self.plan.run(self.x, self.w, self.out, stream)

    def __str__(self) -> str:
        return str(self.plan)


@dataclass(frozen=True)
class Memory:
    """Device memory of one step.

    Args:
        tensor: address of a tensor's storage.
        scratch: address of what ops may use until they end.
        step: address of memory that lives as long as the step, by name.
    """

    tensor: Callable[[Tensor], int]
    scratch: int
    step: Callable[[str], int]


class Binder:
    """Turns the launches of one step into work for a stream."""

    def __init__(
        self,
        ctx: CudaContext,
        weights: WeightStore,
        memory: Memory,
        *,
        tune: bool,
        constants: dict[object, int] | None = None,
    ) -> None:
        """
        Args:
            tune: time cuBLASLt's algorithms now; outputs must hold nothing of worth.
            constants: addresses of weights that are known already, and of those that are asked for now.
        """
        self._ctx = ctx
        self._weights = weights
        self._memory = memory
        self._tune = tune
        self._constants = {} if constants is None else constants
        self._starts: dict[object, int] = {}

    def bind(self, launches: Sequence[Planned]) -> list[Work]:
        """Raises KernelsError for a kernel that was not built, CudaError where it does not load."""
        return [self._launch(p) if isinstance(p, PlannedLaunch) else self._matmul(p) for p in launches]

    def _launch(self, p: PlannedLaunch) -> Launch:
        return Launch(
            self._ctx.library.kernel(p.kernel), p.grid, p.block, [self._argument(a) for a in p.args],
            shared=p.shared, pdl=p.pdl, cluster=p.cluster, cooperative=p.cooperative, label=p.label,
        )  # fmt: skip

    def _matmul(self, p: Planned) -> Matmul:
        assert not isinstance(p, PlannedLaunch)
        x, w, out = (self.address(place) for place in (p.x, p.w, p.out))
        plan = self._ctx.lt.plan(p.problem)
        if self._tune:
            plan.tune(x, w, out, self._ctx.stream, self._ctx.flush)
        return Matmul(plan, x, w, out)

    def _argument(self, arg: PlannedArg) -> Arg:
        if isinstance(arg, Struct):
            values = [self.address(v) if type(v) is Place else v for v in arg.values]
            return packed_struct(arg.kinds, values)
        if isinstance(arg, Boxes):
            return self._ctx.tensor_map(
                self.address(arg.place), arg.sizes, arg.strides, arg.dtype, arg.box, arg.promotion
            ).arg()
        return self._scalar(arg)

    def _scalar(self, arg: Arg) -> Arg:
        return Arg("ptr", self.address(arg.value)) if isinstance(arg.value, Place) else arg

    def address(self, place: Place) -> int:
        held = place.held
        constant = isinstance(held, (Matrix, Codes, Scales, Packed, Vector))
        starts = self._constants if constant else self._starts
        start = starts.get(held)
        if start is None:
            start = starts[held] = self._start(held)
        return start + place.offset

    def _start(self, held: object) -> int:
        match held:
            case Tensor():
                return self._memory.tensor(held)
            case Matrix(tensors, dtype, layout):
                return self._weights.matrix(tensors, dtype, layout).address
            case Codes(tensors, layout):
                return self._weights.fp8(tensors, layout)[0].address
            case Scales(tensors, layout):
                return self._weights.fp8(tensors, layout)[1].address
            case Packed(tensors, form, layout):
                return self._weights.packed(tensors, FORMS[form], layout).address
            case Vector(tensor):
                return self._weights.vector(tensor).address
            case Scratch():
                return self._memory.scratch
            case Arrivals():
                return self._ctx.arrivals.address
            case Control():
                assert self._ctx.peers is not None, "only plans for several ranks have sums over them"
                return self._ctx.peers.control
            case StepMemory():
                return self._memory.step(held.name)
        raise TypeError(f"no address for {held!r}")
