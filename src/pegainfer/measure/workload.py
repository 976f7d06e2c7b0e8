"""The distinct calls of a model's steps, at the sizes of decode and prefill, with inputs.

Every device's op bench walks these; how the calls are repeated and timed is the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pegainfer.measure.ledger import shape_of
from pegainfer.measure.step_shapes import StepShape, StepSizes
from pegainfer.ops.cases.common import i32, normal
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import (
    Arrays,
    Case,
    Operand,
    OpSpec,
    Role,
    Settings,
    block_table,
    chosen_experts,
    state_ids,
)
from pegainfer.ops.tensor import Kind

Array = np.ndarray[Any, Any]

VALUES = {"u32": np.uint32, "u64": np.uint64, "i32": np.int32}

# Op and sizes that no step changes: what calls that differ in layer and weights alone share.
FamilyKey = tuple[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class Family:
    """Calls of one op that differ only in layer and weights.

    Args:
        axes: the sizes that no step changes.
        dtypes: of each operand in use.
        attrs: layer is 0.
        calls: in one step.
    """

    spec: OpSpec
    axes: dict[str, int]
    dtypes: dict[str, str]
    attrs: dict[str, Any]
    calls: int

    @property
    def weights(self) -> list[str]:
        """Operands that are matrices."""
        return [o.name for o in self.spec.operands if o.role is Role.WEIGHT and o.name in self.dtypes]

    @property
    def paged(self) -> bool:
        """Whether it works on a KV cache."""
        return any(o.paged for o in self.spec.operands)

    @property
    def formats(self) -> dict[str, str]:
        """Storage of what may be stored in several ways: matrices and the KV cache."""
        named = {o.name for o in self.spec.operands if o.paged or o.role is Role.WEIGHT}
        return {n: d for n, d in self.dtypes.items() if n in named}

    @property
    def key(self) -> FamilyKey:
        return _family_key(self.spec, self.axes)

    def step_shapes(self, longest: int, sizes: StepSizes) -> tuple[StepShape, ...]:
        """At which a bench measures it; no context is longer than `longest` tokens.

        Of steps that are the same to it, such as one row of 128 tokens and 128 rows of one, the first.
        """
        letters = {a for o in self.spec.operands for a in o.axes} - set(self.spec.idle)
        reads_context = "C" in self.spec.cost_axes
        shapes = sizes.decodes if self.weights or reads_context else sizes.others
        if "T" in letters:  # else it sees only the rows that sample
            shapes += sizes.prefills + (sizes.long if reads_context else ())
        distinct: dict[tuple[object, ...], StepShape] = {}
        for s in shapes:
            if s.context <= longest:
                distinct.setdefault(tuple(shape_of(self.spec, self.axes | s.env).items()), s)
        return tuple(distinct.values())

    def options(self) -> Mapping[str, Settings]:
        return self.spec.settings


def families(programs: Iterable[Program]) -> list[Family]:
    """The distinct calls of a step's programs, already lowered for the device, in order of first use."""
    found: dict[tuple[object, ...], Family] = {}
    for call in (c for program in programs for c in program.on_one_rank().calls):
        axes = {a: n for a, n in call.axes.items() if isinstance(n, int)}
        dtypes = {name: _held_dtype(call, name) for name in call.tensors}
        # Scales differ from layer to layer and cost no time.
        attrs = {k: 0 if k == "layer" else call.spec.defaults.get(k, v) for k, v in call.attrs.items()}
        key = (call.spec.name, *(tuple(sorted(d.items())) for d in (axes, dtypes, attrs)))
        seen = found.get(key, Family(call.spec, axes, dtypes, attrs, 0))
        found[key] = replace(seen, calls=seen.calls + 1)
    return list(found.values())


def family_key(call: OpCall) -> FamilyKey:
    """As Family.key, of one of its calls in any program of the model."""
    return _family_key(call.spec, {a: n for a, n in call.axes.items() if isinstance(n, int)})


def _family_key(spec: OpSpec, axes: Mapping[str, int]) -> FamilyKey:
    return spec.name, tuple(sorted((a, n) for a, n in axes.items() if a not in spec.idle))


def _held_dtype(call: OpCall, name: str) -> str:
    """As the kernels see it: norms and tables become float32 when they are loaded, whatever the file has."""
    t = call.tensors[name]
    constant = t.kind is Kind.WEIGHT and call.spec.operand(name).role is not Role.WEIGHT
    return "f32" if constant else t.dtype


@dataclass(frozen=True)
class Pages:
    """Blocks of a KV pool, dealt out to a step's rows in no order; a different set each `iteration`."""

    blocks: Array  # [N], a permutation
    block_size: int

    def table(self, shape: StepShape, iteration: int) -> Array:
        """[R, ceil(context / S)] int32."""
        each = blocks_of(shape, self.block_size)
        need = shape.rows * each
        start = iteration % max(1, len(self.blocks) // need) * need
        return i32(self.blocks[start : start + need].reshape(shape.rows, each))

    def slots(self, shape: StepShape, iteration: int) -> Array:
        """Places of the step's tokens: [T] int32."""
        where = positions_of(shape).reshape(shape.rows, shape.count)
        blocks = np.take_along_axis(self.table(shape, iteration), where // self.block_size, axis=1)
        return i32(blocks * self.block_size + where % self.block_size).reshape(-1)


def blocks_of(shape: StepShape, block_size: int) -> int:
    """Blocks that one row's context fills."""
    return -(-shape.context // block_size)


def positions_of(shape: StepShape) -> Array:
    one = np.arange(shape.context - shape.count, shape.context)
    return i32(np.tile(one, shape.rows))


def case(
    family: Family,
    shape: StepShape,
    options: Settings,
    seed: int,
    most_ids: int | None = None,
    only: Collection[Role] = (Role.IN, Role.INOUT, Role.STATE, Role.WEIGHT),
) -> Case:
    """One call's inputs, for a checker; a KV pool of one layer that the rows fill.

    Args:
        only: draws operands of these roles.
        most_ids: cuts a matrix of the vocabulary to so many rows, whose results do not depend on each other:
            a reference in float64 takes its time.
    """
    rng = np.random.default_rng(seed)
    sizes = sizes_of(family, shape)
    if family.paged:
        each = blocks_of(shape, sizes["S"])
        sizes |= {"N": shape.rows * each, "Y": 1, "W": each}
    elif state_ids(family.spec) is not None:
        sizes |= {"N": shape.rows, "Y": 1}
    if family.weights and most_ids is not None and "V" in sizes:
        sizes["V"] = min(sizes["V"], most_ids)
    arrays: Arrays = {}
    for o in family.spec.operands:
        if o.role in only and o.name in family.dtypes:
            dims = tuple(int(a) if a.isdigit() else sizes[a] for a in o.axes)
            arrays[o.name] = _values(o, family.dtypes[o.name], dims, rng, options)
    for name in arrays:
        if family.spec.operand(name).into == ("V",):
            arrays[name] = i32(rng.integers(0, sizes.get("V", 1), arrays[name].shape))
    arrays |= step_inputs(family, shape, Pages(rng.permutation(sizes.get("N", 0)), sizes.get("S", 1)), 0)
    label = f"{shape.rows} rows of {shape.count}, context {shape.context}"
    return Case(label, sizes, family.attrs, arrays)


def sizes_of(family: Family, shape: StepShape) -> dict[str, int]:
    """Every axis of a call; history as long as the context, no bias, mask or banned tokens."""
    sizes = {**family.axes, **shape.env, **dict.fromkeys("JEUO", 0)}
    if "history" in family.dtypes:
        sizes |= {"Z": shape.rows, "X": shape.context + 1}
    return sizes


def step_inputs(family: Family, shape: StepShape, pages: Pages, iteration: int) -> Arrays:
    """The inputs that tell where a step's rows lie: int32."""
    rows, count = shape.rows, shape.count
    indices: dict[tuple[str, ...], Callable[[], Array]] = {
        ("P",): lambda: positions_of(shape),
        ("N", "S"): lambda: pages.slots(shape, iteration),
        ("Z",): lambda: i32(np.arange(rows)),
        ("T",): lambda: i32(np.arange(rows) * count + count - 1),
        # Rows take the adapters in turn.
        ("A",): lambda: i32(np.repeat(np.arange(rows) % family.axes["A"], count)),
        ("I",): lambda: i32(np.repeat(np.arange(rows) % family.axes["I"], count)),
    }
    makers: dict[str, Callable[[], Array]] = {
        o.name: indices[o.into] for o in family.spec.operands if o.into in indices
    }
    if (table := block_table(family.spec)) is not None:
        makers[table.name] = lambda: pages.table(shape, iteration)
    if (state := state_ids(family.spec)) is not None:
        makers[state.name] = lambda: i32(np.arange(rows))
    if (chosen := chosen_experts(family.spec)) is not None:
        makers[chosen.name] = lambda: _experts(family, shape, iteration)
    makers |= {
        "query_starts": lambda: i32(np.arange(rows) * count),
        "query_lens": lambda: np.full(rows, count, np.int32),
        "context_lens": lambda: np.full(rows, shape.context, np.int32),
        "history_lens": lambda: np.full(rows, shape.context, np.int32),
        "prompt_lens": lambda: np.full(rows, shape.context // 2, np.int32),
    }
    return {name: make() for name, make in makers.items() if name in family.dtypes}


def _experts(family: Family, shape: StepShape, iteration: int) -> Array:
    """Distinct experts of each token in ascending order, all as likely as each other: [T, K] int32."""
    count, chosen = family.axes["N"], family.axes["K"]
    order = np.random.default_rng(iteration).random((shape.rows * shape.count, count)).argsort(axis=1)
    return i32(np.sort(order[:, :chosen], axis=1))


def _values(
    o: Operand, dtype: str, dims: tuple[int, ...], rng: np.random.Generator, given: Settings
) -> Array:
    kind = VALUES.get(dtype, np.float32)
    option = given.get(o.name, o.neutral)
    if option is not None:
        return np.full(dims, option, kind)
    if o.fill is not None:
        return o.fill(rng, dims).astype(kind)
    if dtype in VALUES:
        return np.zeros(dims, kind)
    values = normal(rng, dims)
    if o.role is Role.WEIGHT:
        return values * np.float32(dims[-1] ** -0.5)
    return 1 + values / 4 if o.role is Role.IN and len(dims) == 1 else values  # gains of norms are near 1


def largest_of(shapes: Iterable[StepShape]) -> dict[str, int]:
    """The greatest T, R and L: what a program over all of them is planned for."""
    envs = [s.env for s in shapes]
    return {a: max(e[a] for e in envs) for a in "TRL"}
