"""From calls to planned launches: what an op's function is given, and the functions by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.lower.cuda.plan import (
    SCRATCH,
    Matrix,
    Place,
    Planned,
    PlannedArg,
    PlannedLaunch,
    PlannedMatmul,
    StepMemory,
    StepPlan,
    Vector,
    call_label,
)
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind, Sizes
from pegainfer.runtime.cuda.cublaslt import MatmulProblem
from pegainfer.runtime.cuda.memory import aligned


@dataclass(frozen=True)
class Step:
    """The sizes of a step, and the card that it is lowered for.

    Args:
        decode_only: no row has more than one query token.
    """

    target: Target
    env: Sizes
    decode_only: bool


class Operands:
    """One call's sizes, and where its operands lie."""

    def __init__(self, call: OpCall, step: Step) -> None:
        self.call = call
        self.step = step

    @cached_property
    def sizes(self) -> dict[str, int]:
        return self.call.sizes(self.step.env)

    @property
    def attrs(self) -> dict[str, object]:
        return self.call.attrs

    def dtype(self, name: str) -> str:
        return self.call.tensors[name].dtype

    def address(self, name: str) -> Place:
        """Of an operand that is not a weight."""
        return Place(self.call.tensors[name].storage)

    def vector(self, name: str) -> Place | None:
        """A norm's weight or a table, in float32; None where the call has no such operand.

        Where an op is called by itself, it may be an input, and must be float32 then.
        """
        t = self.call.tensors.get(name)
        if t is None:
            return None
        if t.kind is Kind.WEIGHT:
            return Place(Vector(t.storage))
        if t.dtype != "f32":
            raise self.refuse(f"dtype of {name}", "f32", t.dtype)
        return Place(t.storage)

    def matrix(self, *names: str, dtype: str, layout: str = "rows") -> Place:
        """One weight, or several as one (layouts: see WeightStore)."""
        return Place(Matrix(tuple(self.call.tensors[n].storage for n in names), dtype, layout))

    def one_dtype(self, first: str, *others: str) -> str:
        """The dtype that all of these operands have. Raises UnsupportedError where they differ."""
        dtype = self.dtype(first)
        for name in others:
            if self.dtype(name) != dtype:
                raise self.refuse(f"dtype of {name}", dtype, self.dtype(name))
        return dtype

    def refuse(self, what: str, required: object, offered: object) -> UnsupportedError:
        """The error for an op that no kernel variant serves."""
        return UnsupportedError(
            f"{self.call.spec.name} on CUDA: {what}", expected=required, got=offered,
            where=call_label(self.call, self.step.env),
        )  # fmt: skip


class LoweringContext(Operands):
    """Argument of the function that lowers an op: the call's operands, and the plan to which it adds
    launches."""

    def __init__(self, call: OpCall, step: Step, plan: StepPlan) -> None:
        super().__init__(call, step)
        self.target = step.target
        self._plan = plan
        self._launches: list[Planned] = []
        self._used = 0
        self._whole = False
        self._follows = any(launches for _, launches in plan.calls)
        plan.calls.append((call, self._launches))

    @cached_property
    def label(self) -> str:
        return call_label(self.call, self.step.env)

    def scratch(self, nbytes: int) -> Place:
        """Memory that is this op's until it ends."""
        start, self._used = self._used, self._used + aligned(nbytes)
        self._plan.scratch_bytes = max(self._plan.scratch_bytes, self._used)
        return Place(SCRATCH, start)

    def step_memory(self, name: str, nbytes: int, *, zeroed: bool = False) -> Place:
        """Memory that lives as long as the step; equal names share it."""
        self._plan.reserve(name, nbytes)
        if zeroed:
            self._plan.zeroed.add(name)
        return Place(StepMemory(name, nbytes, zeroed))

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[PlannedArg],
        shared: int = 0,
        *,
        why: str = "the op's only kernel",
        cluster: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Adds a kernel; none for an empty grid."""
        if 0 in grid:
            return
        # The step's first kernel waits for the launches ahead of the calls, because some kernels read their
        # results before griddepcontrol.wait.
        pdl = self.target.info.pdl and (self._follows or bool(self._launches)) and not self._whole
        self._whole = False
        self._launches.append(
            PlannedLaunch(
                kernel, grid, block, tuple(args), self.label, why, shared, pdl, cluster, cooperative
            )
        )

    def finish_launches(self) -> None:
        """Makes the next launch start only after all earlier ones have ended.

        Needed after a launch that writes a weight, because GEMMs read weights before griddepcontrol.wait.
        """
        self._whole = True

    def launch_ahead(
        self, kernel: str, grid: tuple[int, int, int], block: int, args: Sequence[PlannedArg], why: str
    ) -> None:
        """Adds a kernel before the step's first call, unless an equal launch is there already."""
        launch = PlannedLaunch(kernel, grid, block, tuple(args), self.label, why)
        if launch not in self._plan.ahead:
            self._plan.ahead.append(launch)

    def matmul(self, problem: MatmulProblem, x: Place, w: Place, out: Place, why: str) -> None:
        self._whole = False  # the library's kernels start when those before them have ended
        if problem.m:
            self._launches.append(PlannedMatmul(problem, x, w, out, self.label, why))


Lower = Callable[[LoweringContext], None]
HANDLERS: dict[str, Lower] = {}
WHOLE: dict[str, Callable[[OpCall], bool]] = {}  # coarse ops that may stay whole, and when


def handles(*ops: str, whole: Callable[[OpCall], bool] | None = None) -> Callable[[Lower], Lower]:
    """Registers a function as the one that lowers these ops."""

    def register(function: Lower) -> Lower:
        for op in ops:
            if op in HANDLERS:
                raise OpError(f"op {op} is lowered twice")
            HANDLERS[op] = function
            if whole is not None:
                WHOLE[op] = whole
        return function

    return register


def keeps_whole(call: OpCall) -> bool:
    """Whether a coarse call has a kernel of its own for its dtypes and sizes."""
    check = WHOLE.get(call.spec.name)
    return check is not None and check(call)


def choose(calls: Sequence[tuple[OpCall, int]], step: Step) -> StepPlan:
    """Plans the launches of rewritten calls, in order. Pure: no driver is asked.

    Args:
        calls: each with how many calls of the program it stands for.

    Raises UnsupportedError where no kernel serves one.
    """
    plan = StepPlan(step.env, step.decode_only)
    for call, replaces in calls:
        handler = HANDLERS.get(call.spec.name)
        if handler is None:
            raise UnsupportedError(
                "op has no CUDA kernel", expected=" ".join(sorted(HANDLERS)), got=call.spec.name
            )
        handler(LoweringContext(call, step, plan))
        plan.replaces.append(replaces)
    return plan


def blocks(work: int, each: int) -> int:
    """The number of blocks of `each` elements that cover `work`: the quotient, rounded up."""
    return -(-work // each)
