"""The declaration of an op, from which tests, benches, ledger, simulator and docs are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.errors import OpError
from pegainfer.ops.tensor import FLOATS, FORMATS, WEIGHTS, Dim, Sizes, Tensor

Arrays = dict[str, np.ndarray[Any, Any]]
INTS = ("i32",)
# Quoted, so that a server does not import numpy.random, which takes 15 ms.
Fill = Callable[["np.random.Generator", tuple[int, ...]], np.ndarray[Any, Any]]
Settings = Mapping[str, float]
STEP_AXES = frozenset("TRLJEUO")  # sizes that change from step to step; all others are fixed in a program


class Role(StrEnum):
    IN = "in"
    OUT = "out"  # written whole, never read
    INOUT = "inout"  # read and written in place
    WEIGHT = "weight"
    STATE = "state"  # read and written at places that other operands name


class Operand(msgspec.Struct, frozen=True):
    """One tensor of an op.

    Args:
        axes: letters of GLOSSARY.md, or numbers.
        into: of indices, the axes whose entries they number: 'V' of token ids, 'N S' of places in a KV cache
            (block · S + offset). Empty for other operands.
        fill: values that a bench gives it, of this shape; None: zeros for whole numbers, of which
            the workload makes indices and lengths valid, else normal ones.
        neutral: the value of an option that has no effect, which a bench gives it; None for other operands.
    """

    name: str
    role: Role
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    into: tuple[str, ...] = ()
    fill: Fill | None = None
    neutral: float | None = None

    @property
    def paged(self) -> bool:
        """Whether it is a KV cache: blocks of S tokens, [N, Y, 2, G, S, D] or of latents [N, Y, S, D]."""
        return self.role is Role.STATE and "S" in self.axes


def _operand(role: Role, default: tuple[str, ...]) -> Callable[..., Operand]:
    def make(
        name: str,
        axes: str,
        dtypes: tuple[str, ...] = default,
        optional: bool = False,
        into: str = "",
        fill: Fill | None = None,
        neutral: float | None = None,
    ) -> Operand:
        return Operand(name, role, tuple(axes.split()), dtypes, optional, tuple(into.split()), fill, neutral)

    return make


In = _operand(Role.IN, FLOATS)
Out = _operand(Role.OUT, FLOATS)
InOut = _operand(Role.INOUT, FLOATS)
Weight = _operand(Role.WEIGHT, WEIGHTS)
State = _operand(Role.STATE, FLOATS)


class Tolerance(msgspec.Struct, frozen=True):
    """|got - want| ≤ atol + rtol · |want| + bound, element by element, and why so much is allowed.

    Whole numbers must be equal, NaN must meet NaN, infinity its like.

    Args:
        bound: from a case as the reference saw it before the call (weights dequantised), what |want| cannot
            tell, by output and broadcastable to it: sums that cancel err by their terms, not by their result.
    """

    rtol: float
    atol: float
    reason: str
    bound: Callable[[Case], Arrays] | None = None


class Cost(msgspec.Struct, frozen=True):
    """What a call must move and compute at the least; the roofline's two axes."""

    bytes: int
    flops: int


class Case(msgspec.Struct, frozen=True):
    """One input for a test or bench: axis sizes, attributes, and arrays that suit the op.

    Weights are float32 [N, K] before quantisation; states are in the reference's layout.
    """

    label: str
    sizes: dict[str, int]
    attrs: dict[str, Any]
    arrays: Arrays


class OpSpec(msgspec.Struct, frozen=True):
    """An op, declared once.

    Args:
        name: the field's term for it.
        doc: one line with formula or source.
        operands: tensors in call order, outputs first.
        attrs: names of scalar parameters.
        defaults: values of attributes that a call may leave out.
        reference: called with arrays by operand name and attributes by name; writes outputs in place, in
            float64 inside. Weights come as float32 [N, K].
        flops: from axis sizes (the step's own sizes included).
        bytes: from axis sizes and operand bytes; None: each operand once (twice if in place).
        requires: (text, predicate over axis sizes) that must hold.
        lower: for a coarse op, emits the finer ops that it is made of.
        fold: for a reduction over ranks, from the call before it and its own: the one call that they are on
            one rank; None where the call before does not make what is reduced.
        cases: hostile inputs from a generator: sizes at the edges, large and tiny values, odd layouts.
        tolerance: by the dtype of the arithmetic.
        idle: axes that a call's time does not depend on: capacities, and rows that the op passes over.
        cost_axes: sizes of a step that no operand has but `flops` or `bytes` reads: C, cached tokens read; Q,
            query-key pairs.
        settings: what users may ask for that its time depends on: name -> values of operands that their
            `fill` does not give.
        sequential: a token's result depends on those before it in the row, through a state. A checker of
            large calls compares some tokens or rows of other ops, of these all.
    """

    name: str
    doc: str
    operands: tuple[Operand, ...]
    reference: Callable[..., None] | None = None
    attrs: tuple[str, ...] = ()
    defaults: Mapping[str, float] = msgspec.field(default_factory=dict)
    flops: Callable[[Sizes], int] = lambda s: 0
    bytes: Callable[[Sizes, Mapping[str, int]], int] | None = None
    requires: tuple[tuple[str, Callable[[Sizes], bool]], ...] = ()
    lower: Callable[..., None] | None = None
    fold: Callable[[Any, Any], Any] | None = None
    cases: Callable[[np.random.Generator], list[Case]] | None = None
    tolerance: Mapping[str, Tolerance] = msgspec.field(default_factory=dict)
    idle: str = ""
    cost_axes: str = ""
    settings: Mapping[str, Settings] = msgspec.field(default_factory=lambda: {"": {}})
    sequential: bool = False

    @property
    def coarse(self) -> bool:
        return self.lower is not None

    def operand(self, name: str) -> Operand:
        return next(o for o in self.operands if o.name == name)

    def bind(self, tensors: Mapping[str, Tensor | None], attrs: Mapping[str, Any]) -> dict[str, Dim]:
        """Checks a call at the op's door and returns what each axis letter stands for.

        Raises OpError that names the op, the tensor, the axis and both sizes.
        """
        known = {o.name for o in self.operands}
        if extra := sorted(set(tensors) - known) + sorted(set(attrs) - set(self.attrs)):
            raise OpError(f"{self.name}: unknown operand or attribute", got=extra, expected=sorted(known))
        if missing := sorted(set(self.attrs) - set(attrs) - set(self.defaults)):
            raise OpError(f"{self.name}: attribute missing", expected=missing)
        axes: dict[str, Dim] = {}
        for o in self.operands:
            t = tensors.get(o.name)
            if t is None:
                if not o.optional:
                    raise OpError(f"{self.name}: operand {o.name} is missing", expected=o)
                continue
            self._bind_one(o, t, axes)
        numbers = {k: v for k, v in axes.items() if isinstance(v, int)}
        for text, holds in self.requires:
            if not holds(numbers):
                raise OpError(f"{self.name}: sizes do not fit", expected=text, got=numbers)
        return axes

    def _bind_one(self, o: Operand, t: Tensor, axes: dict[str, Dim]) -> None:
        if t.dtype not in o.dtypes:
            raise OpError(f"{self.name}: dtype of {o.name}", expected=" | ".join(o.dtypes), got=str(t))
        if len(t.shape) != len(o.axes):
            raise OpError(f"{self.name}: rank of {o.name}", expected=list(o.axes), got=str(t))
        for axis, size in zip(o.axes, t.shape, strict=True):
            want = int(axis) if axis.isdigit() else axes.setdefault(axis, size)
            if want != size:
                raise OpError(f"{self.name}: axis {axis} of {o.name}", expected=want, got=f"{size} ({t})")
        if o.role is Role.WEIGHT and t.dtype in FORMATS:
            per_block = FORMATS[t.dtype][0]
            if isinstance(t.shape[-1], int) and t.shape[-1] % per_block:
                raise OpError(
                    f"{self.name}: width of {o.name}", expected=f"a multiple of {per_block}", got=str(t)
                )


def block_table(spec: OpSpec) -> Operand | None:
    """The operand that lists the KV blocks of each row; None without one."""
    return next((o for o in spec.operands if o.into == ("N",) and o.axes == ("R", "W")), None)


def state_ids(spec: OpSpec) -> Operand | None:
    """The operand that says which recurrent state each row has; None without one."""
    return next((o for o in spec.operands if o.into == ("N",) and o.axes == ("R",)), None)


def chosen_experts(spec: OpSpec) -> Operand | None:
    """The operand that lists the experts of each token; None without one."""
    return next((o for o in spec.operands if o.into == ("N",) and o.axes == ("T", "K")), None)


REGISTRY: dict[str, OpSpec] = {}
FUSED: dict[str, OpSpec] = {}  # forms that no forward emits: rewrites put them in the place of others


def declare(spec: OpSpec) -> OpSpec:
    """Adds a declaration to the registry that tests, benches and docs walk."""
    if spec.name in REGISTRY:
        raise OpError(f"op {spec.name} is declared twice")
    REGISTRY[spec.name] = spec
    return spec


def declare_fused(spec: OpSpec) -> OpSpec:
    """Adds a fused form to its registry."""
    if spec.name in FUSED or spec.name in REGISTRY:
        raise OpError(f"op {spec.name} is declared twice")
    FUSED[spec.name] = spec
    return spec


def run_op(spec: OpSpec, *arrays: np.ndarray[Any, Any], **attrs: Any) -> None:
    """An op's reference on arrays in the order of its operands; optional ones at the end may be left out."""
    assert spec.reference is not None, f"{spec.name} is a coarse op"
    spec.reference(**dict(zip((o.name for o in spec.operands), arrays, strict=False)), **attrs)
