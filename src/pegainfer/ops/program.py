"""A recorded forward pass: calls in order over symbolic tensors. Every backend executes this one thing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from pegainfer.contract.errors import OpError
from pegainfer.ops.spec import Cost, OpSpec, Role
from pegainfer.ops.tensor import Dim, Kind, Sizes, Tensor

ARENA_ALIGN = 64  # bytes: a cache line, and the widest vector


class OpCall(msgspec.Struct, frozen=True, dict=True):
    """One op on its operands. `axes` maps the op's letters to this call's dimensions."""

    spec: OpSpec
    tensors: dict[str, Tensor]
    attrs: dict[str, Any]
    axes: dict[str, Dim]

    @classmethod
    def of(cls, spec: OpSpec, attrs: Mapping[str, Any], **tensors: Tensor | None) -> OpCall:
        """Checks operands and attributes against the op's declaration. Raises OpError."""
        axes = spec.bind(tensors, attrs)
        given = {k: t for k, t in tensors.items() if t is not None}
        return cls(spec, given, {**spec.defaults, **attrs}, axes)

    def sizes(self, env: Sizes) -> dict[str, int]:
        """Axis letters in numbers, beside the step's own sizes."""
        fixed, symbolic = self._axes
        sizes = {**env, **fixed}
        for letter, symbol in symbolic:
            sizes[letter] = env[symbol]
        return sizes

    @cached_property
    def _axes(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Axes with a number, and those with a step's size. A call is asked for its sizes many times."""
        return (
            {k: v for k, v in self.axes.items() if isinstance(v, int)},
            [(k, v) for k, v in self.axes.items() if isinstance(v, str)],
        )

    def cost(self, env: Sizes) -> Cost:
        sizes = self.sizes(env)
        held = {name: t.nbytes(env) for name, t in self.tensors.items()}
        if self.spec.bytes is not None:
            moved = self.spec.bytes(sizes, held)
        else:
            twice = {o.name for o in self.spec.operands if o.role is Role.INOUT}
            moved = sum(n * (2 if name in twice else 1) for name, n in held.items())
        return Cost(moved, self.spec.flops(sizes))

    def reads(self) -> Iterator[Tensor]:
        for o in self.spec.operands:
            if o.role is not Role.OUT and o.name in self.tensors:
                yield self.tensors[o.name].storage

    def __str__(self) -> str:
        args = ", ".join(f"{k}={v.name}" for k, v in self.tensors.items())
        attrs = "".join(f", {k}={v}" for k, v in self.attrs.items())
        return f"{self.spec.name}({args}{attrs})"


def is_read(calls: Sequence[OpCall], t: Tensor) -> bool:
    """Whether one of the calls reads what t holds before any of them."""
    for call in calls:
        roles = {
            o.role for o in call.spec.operands if o.name in call.tensors and call.tensors[o.name].storage is t
        }
        if roles:
            return roles != {Role.OUT}
    return False


class ArenaPlan(msgspec.Struct, frozen=True):
    """Where each buffer lies (bytes from the arena's start) when all step sizes are at their greatest."""

    offsets: dict[Tensor, int]
    size: int


class PlanRow(msgspec.Struct, frozen=True):
    """A call in numbers, as `pegainfer doctor --plan` shows it."""

    index: int
    op: str
    operands: tuple[str, ...]  # 'operand=tensor[sizes] dtype', and '@offset' in the arena for buffers
    cost: Cost


class Program(msgspec.Struct, frozen=True):
    """Calls in execution order. Immutable once built."""

    name: str
    calls: tuple[OpCall, ...]

    def tensors(self, *kinds: Kind) -> list[Tensor]:
        """Storage tensors of these kinds (all if none is named), in order of first use."""
        seen = {t.storage: None for c in self.calls for t in c.tensors.values()}
        return [t for t in seen if not kinds or t.kind in kinds]

    def on_one_rank(self) -> Program:
        """Reductions over ranks folded into the calls that make what they reduce."""
        calls: list[OpCall] = []
        for i, call in enumerate(self.calls):
            fold = call.spec.fold
            folded: OpCall | None = fold(calls[-1], call) if fold is not None and calls else None
            if folded is None or is_read(self.calls[i + 1 :], calls[-1].tensors["out"].storage):
                calls.append(call)
            else:
                calls[-1] = folded
        return Program(self.name, tuple(calls))

    def lowered(self, keep: Callable[[OpCall], bool], *, ranks: int = 1) -> Program:
        """As one of `ranks` ranks runs it, with coarse calls replaced by what they are made of, except those
        that `keep` accepts whole.
        """
        calls: list[OpCall] = []
        for i, call in enumerate((self if ranks > 1 else self.on_one_rank()).calls):
            if not call.spec.coarse or keep(call):
                calls.append(call)
                continue
            inside = Builder(self.name, prefix=f"{i}.{call.spec.name}.")
            _emit_lowered(call.spec, inside, call.tensors, call.attrs)
            calls += Program(self.name, tuple(inside.calls)).lowered(keep, ranks=ranks).calls
        return Program(self.name, tuple(calls))

    def plan_arena(self, largest: Sizes, elsewhere: Collection[str] = ()) -> ArenaPlan:
        """Packs buffers by lifetime: largest first, each at the lowest offset free while it lives.

        elsewhere: names of outputs that are not in the arena.
        """
        first: dict[Tensor, int] = {}
        last: dict[Tensor, int] = {}
        for i, call in enumerate(self.calls):
            for t in call.tensors.values():
                s = t.storage
                if s.kind is Kind.BUFFER or (s.kind is Kind.OUTPUT and s.name not in elsewhere):
                    first.setdefault(s, i)
                    last[s] = len(self.calls) if s.kind is Kind.OUTPUT else i
        placed: list[tuple[int, int, Tensor]] = []
        for t in sorted(first, key=lambda t: (-t.nbytes(largest), first[t], t.name)):
            need = -(-t.nbytes(largest) // ARENA_ALIGN) * ARENA_ALIGN
            alive = sorted(p[:2] for p in placed if first[p[2]] <= last[t] and first[t] <= last[p[2]])
            at = 0
            for start, end in alive:
                if at + need <= start:
                    break
                at = max(at, end)
            placed.append((at, at + need, t))
        return ArenaPlan({t: a for a, _, t in placed}, max((e for _, e, _ in placed), default=0))

    def cost(self, env: Sizes) -> Cost:
        each = [c.cost(env) for c in self.calls]
        return Cost(sum(c.bytes for c in each), sum(c.flops for c in each))

    def rows(self, env: Sizes, largest: Sizes | None = None) -> list[PlanRow]:
        """One row a call, coarse calls as they stand; `lowered` first to see what they are made of.

        Args:
            largest: step sizes that the arena is planned for; those of `env` if None.
        """
        offsets = self.plan_arena(largest or env).offsets

        def show(operand: str, t: Tensor) -> str:
            at = f" @{offsets[t.storage]}" if t.storage in offsets else ""
            sizes = ", ".join(map(str, t.sizes(env)))
            return f"{operand}={t.name}[{sizes}] {t.dtype}{at}"

        return [
            PlanRow(i, c.spec.name, tuple(show(k, t) for k, t in c.tensors.items()), c.cost(env))
            for i, c in enumerate(self.calls)
        ]

    def describe(self, env: Sizes, largest: Sizes | None = None) -> str:
        """`rows` as text under a line of totals. Bytes are what the ops must move, not what they hold."""
        rows, total = self.rows(env, largest), self.cost(env)
        sizes = " ".join(f"{k}={v}" for k, v in env.items())
        arena = self.plan_arena(largest or env).size
        lines = [
            f"{self.name}: {len(rows)} calls at {sizes}; arena {arena} bytes",
            f"{'':4} {'op':22} {'bytes':>14} {'FLOPs':>14}  operands",
        ]
        for r in rows:
            cost = f"{r.cost.bytes:14} {r.cost.flops:14}"
            lines.append(f"{r.index:4} {r.op:22} {cost}  {'; '.join(r.operands)}")
        lines.append(f"{'':4} {'total':22} {total.bytes:14} {total.flops:14}")
        return "\n".join(lines)


class Builder:
    """What a forward is written against: it names buffers and emits ops; nothing is computed.

    Mutated by each call; `build()` freezes it.
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        self.name = name
        self.calls: list[OpCall] = []
        self._prefix = prefix
        self._names: set[str] = set()

    def _tensor(self, name: str, shape: tuple[Dim, ...], dtype: str, kind: Kind) -> Tensor:
        full = self._prefix + name
        if full in self._names:
            raise OpError(f"program {self.name}: tensor {full} is declared twice")
        self._names.add(full)
        return Tensor(full, shape, dtype, kind)

    def buffer(self, name: str, *shape: Dim, dtype: str = "f32") -> Tensor:
        return self._tensor(name, shape, dtype, Kind.BUFFER)

    def output(self, name: str, *shape: Dim, dtype: str = "f32") -> Tensor:
        return self._tensor(name, shape, dtype, Kind.OUTPUT)

    def input(self, name: str, *shape: Dim, dtype: str = "i32") -> Tensor:
        return self._tensor(name, shape, dtype, Kind.INPUT)

    def weight(self, name: str, *shape: Dim, dtype: str) -> Tensor:
        return self._tensor(name, shape, dtype, Kind.WEIGHT)

    def state(self, name: str, *shape: Dim, dtype: str) -> Tensor:
        return self._tensor(name, shape, dtype, Kind.STATE)

    def emit(self, spec: OpSpec, attrs: Mapping[str, Any] | None = None, **tensors: Tensor | None) -> None:
        """Checks the call against the op's declaration and records it. Raises OpError."""
        self.calls.append(OpCall.of(spec, attrs or {}, **tensors))

    def build(self) -> Program:
        """Freezes the calls. Raises OpError where a call reads a buffer that none before it wrote."""
        written: set[Tensor] = set()
        for call in self.calls:
            for t in call.reads():
                if t.kind in (Kind.BUFFER, Kind.OUTPUT) and t not in written:
                    raise OpError(f"program {self.name}: {call} reads {t.name} before anything wrote it")
            written.update(t.storage for t in call.tensors.values())
        return Program(self.name, tuple(self.calls))


def _emit_lowered(
    spec: OpSpec, b: Builder, tensors: Mapping[str, Tensor | None], attrs: Mapping[str, Any]
) -> None:
    """Emits the finer ops of a coarse call into `b`."""
    assert spec.lower is not None
    spec.lower(b, **{o.name: tensors.get(o.name) for o in spec.operands}, **attrs)
