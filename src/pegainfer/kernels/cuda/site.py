"""Where an op is lowered to launches: its numbers, addresses and scratch, and the list of launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pegainfer.contract.errors import OpError, UnsupportedError
from pegainfer.kernels.cuda.context import CudaContext
from pegainfer.kernels.cuda.store import WeightStore
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind, Sizes, Tensor
from pegainfer.runtime.cuda.cublaslt import MatmulPlan, MatmulProblem
from pegainfer.runtime.cuda.launch import Arg, Launch
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.stream import Stream


class Work(Protocol):
    """Something that goes on a stream."""

    def __call__(self, stream: Stream) -> None: ...


@dataclass(frozen=True)
class Matmul:
    """A product by cuBLASLt on fixed addresses."""

    plan: MatmulPlan
    x: int
    w: int
    out: int

    def __call__(self, stream: Stream) -> None:
        self.plan.run(self.x, self.w, self.out, stream)

    def __str__(self) -> str:
        return str(self.plan)


@dataclass
class Memory:
    """Device memory of one lowering.

    Args:
        address: of a tensor's storage.
        scratch: start and size of what ops may use until they end; `needed` grows past the size if it must.
        kept: named pieces that live as long as the step: (key, bytes) -> address.
    """

    address: Callable[[Tensor], int]
    scratch: int
    scratch_bytes: int
    kept: Callable[[str, int], int]
    needed: int = 0


@dataclass(frozen=True)
class NormedRows:
    """What an op leaves for the one that follows and begins with a norm of the same x.

    Args:
        x, norm: addresses of what is normalised and of the norm's weight.
        address: of x times that weight, in x's dtype.
        squares: address of [groups, …] float32: a token's sum over groups is that of x's squares.
    """

    x: int
    norm: int
    address: int
    squares: int
    groups: int


@dataclass(frozen=True)
class ProjectedHeads:
    """q, k and v of the step's tokens before norm, rotation and append, for attention that does these itself.

    Args:
        address: of [T, H + 2 G, D] in the cache's dtype.
        q_norm, k_norm: addresses of the norms' weights; None without such a norm.
        positions, slots, cos_sin: of that op's operands.
    """

    address: int
    q_norm: int | None
    k_norm: int | None
    positions: int
    slots: int
    cos_sin: int | None
    eps: float


Handed = NormedRows | ProjectedHeads


@dataclass
class Site:
    """One step's lowering; `call` is the op under way.

    Args:
        apart: each op leaves all that it declares, for one who looks between them: none leaves a part of its
            work to the next.
    """

    ctx: CudaContext
    weights: WeightStore
    memory: Memory
    env: Sizes
    decode_only: bool  # no row has more than one query token
    tune: bool  # time cuBLASLt's algorithms now (outputs hold nothing of worth yet)
    apart: bool = False
    work: list[Work] = field(default_factory=list)
    ahead: list[Work] = field(default_factory=list)  # what runs before the first call
    counts: list[int] = field(default_factory=list)  # launches of each call
    shared: dict[object, int] = field(default_factory=dict)  # what calls of one step may reuse
    call: OpCall | None = None
    rest: Sequence[OpCall] = ()  # the calls after it
    handed: Handed | None = None  # by the op right before this one
    _handing: Handed | None = None
    _used: int = 0

    def enter(self, call: OpCall, rest: Sequence[OpCall] = ()) -> None:
        """The scratch of the op before is free again."""
        self.call, self.rest, self._used = call, rest, 0
        self.handed, self._handing = self._handing, None

    def hand(self, what: Handed) -> None:
        """Gives something to the op that follows, and to no other; it must not lie in this op's scratch."""
        self._handing = what

    def handed_rows(self, x: int, norm: int | None) -> NormedRows | None:
        """What the op before has left of this norm of x."""
        rows = self.handed
        return rows if isinstance(rows, NormedRows) and (rows.x, rows.norm) == (x, norm) else None

    @property
    def following(self) -> OpCall | None:
        return self.rest[0] if self.rest else None

    @property
    def this(self) -> OpCall:
        assert self.call is not None
        return self.call

    def sizes(self) -> dict[str, int]:
        return self.this.sizes(self.env)

    def dtype(self, name: str) -> str:
        return self.this.tensors[name].dtype

    def address(self, name: str) -> int:
        """Of an operand that is not a weight."""
        return self.memory.address(self.this.tensors[name].storage)

    def vector(self, name: str) -> int | None:
        """Address of a norm's weight or a table, in float32; None where the call has no such operand.

        Where an op is called by itself, it may be an input, and must be float32 then.
        """
        t = self.this.tensors.get(name)
        if t is None:
            return None
        if t.kind is Kind.WEIGHT:
            return self.weights.vector(t.storage).address
        if t.dtype != "f32":
            raise self.refuse(f"dtype of {name}", "f32", t.dtype)
        return self.memory.address(t.storage)

    def matrix(self, *names: str, dtype: str, layout: str = "rows") -> int:
        """Address of one weight, or of several as one (layouts: see WeightStore)."""
        tensors = tuple(self.this.tensors[n].storage for n in names)
        return self.weights.matrix(tensors, dtype, layout).address

    def scratch(self, nbytes: int) -> int:
        """Address of memory that is this op's until it ends."""
        start, self._used = self._used, self._used + aligned(nbytes)
        self.memory.needed = max(self.memory.needed, self._used)
        return self.memory.scratch + start

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Arg],
        shared: int = 0,
        ahead: bool = False,
        cluster: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Adds a kernel; none for an empty grid. `ahead`: before the step's first call."""
        if 0 in grid:
            return
        loaded = self.ctx.library.kernel(kernel)
        # The step's first kernel waits for what was made ahead of it: some look at that before they wait.
        pdl = self.ctx.device.info.pdl and bool(self.work) and not ahead
        launch = Launch(
            loaded, grid, block, args, shared=shared, pdl=pdl, cluster=cluster, cooperative=cooperative,
            label=self.label(),
        )  # fmt: skip
        (self.ahead if ahead else self.work).append(launch)

    def matmul(self, problem: MatmulProblem, x: int, w: int, out: int) -> None:
        if problem.m == 0:
            return
        plan = self.ctx.lt.plan(problem)
        if self.tune:
            plan.tune(x, w, out, self.ctx.stream, self.ctx.flush)
        self.work.append(Matmul(plan, x, w, out))

    def label(self) -> str:
        """Op and axis sizes, for errors and listings."""
        numbers = self.sizes()
        return " ".join([self.this.spec.name, *(f"{a}={numbers[a]}" for a in self.this.axes)])

    def refuse(self, what: str, required: object, offered: object) -> UnsupportedError:
        """The error for an op that no kernel variant serves."""
        return UnsupportedError(
            f"{self.this.spec.name} on CUDA: {what}", expected=required, got=offered, where=self.label()
        )


Lower = Callable[[Site], None]
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
    """Whether a coarse call has a fused form for its dtypes and sizes."""
    check = WHOLE.get(call.spec.name)
    return check is not None and check(call)


def lower(site: Site, calls: Sequence[OpCall]) -> None:
    """Lowers calls in order. Raises UnsupportedError where no kernel serves one."""
    for number, call in enumerate(calls, 1):
        site.enter(call, calls[number:])
        before = len(site.work)
        handler = HANDLERS.get(call.spec.name)
        if handler is None:
            raise UnsupportedError(
                "op has no CUDA kernel", expected=" ".join(sorted(HANDLERS)), got=call.spec.name
            )
        handler(site)
        site.counts.append(len(site.work) - before)


def blocks(work: int, each: int) -> int:
    """How many pieces of `each` cover `work`."""
    return -(-work // each)


def listing(work: Sequence[Work], env: Mapping[str, int]) -> str:
    """A step's launches, one a line."""
    head = " ".join(f"{k}={v}" for k, v in env.items())
    return "\n".join([f"step {head}: {len(work)} launches", *(f"  {w}" for w in work)])
