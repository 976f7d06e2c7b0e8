"""What a model's steps ask of its ops: each distinct call, at the sizes of decode and prefill, with inputs.

Every device's op bench walks these; how the calls are repeated and timed is the device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pegainfer.kernels.ledger import IDLE_AXES, shape_of
from pegainfer.kernels.loads import Loads, StepShape
from pegainfer.ops.cases.common import i32, normal
from pegainfer.ops.cases.pointwise import rotation_table
from pegainfer.ops.program import OpCall, Program
from pegainfer.ops.spec import Arrays, Case, OpSpec, Role
from pegainfer.ops.tensor import Kind

Array = np.ndarray[Any, Any]

ROPE_THETA = 1e4
VALUES = {"u32": np.uint32, "u64": np.uint64, "i32": np.int32}


# What users ask of sampling, by op: name -> values of operands that are not the neutral ones.
Options = Mapping[str, float]
SAMPLING: dict[str, dict[str, Options]] = {
    "adjust_logits": {
        "none": {},
        "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    },
    "sample_tokens": {
        "greedy": {"temperature": 0.0},
        "temperature 0.8": {"temperature": 0.8},
        "top_k 40": {"temperature": 0.8, "top_k": 40},
        "top_k 40, top_p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
        "min_p 0.1": {"temperature": 0.8, "min_p": 0.1},
    },
    "token_logprobs": {"top 5": {"top_lens": 5}},
}
NEUTRAL: Options = {"repetition_penalty": 1.0, "top_p": 1.0, "mask_rows": -1, "top_lens": -1}
# Parameters of a row that are off where no option names them.
SCALARS = frozenset({"temperature", "min_p", "frequency_penalty", "presence_penalty", "bias_values"})
LOGITS_SPREAD = 4.0  # standard deviation of a trained model's logits, about


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
        return "kv" in self.dtypes

    @property
    def formats(self) -> dict[str, str]:
        """Storage of what may be stored in several ways: matrices and the KV cache."""
        return {n: d for n, d in self.dtypes.items() if n in self.weights or n == "kv"}

    @property
    def key(self) -> FamilyKey:
        return _family_key(self.spec, self.axes)

    def step_shapes(self, longest: int, loads: Loads) -> tuple[StepShape, ...]:
        """At which a bench measures it; no context is longer than `longest` tokens.

        Of steps that are the same to it, such as one row of 128 tokens and 128 rows of one, the first.
        """
        letters = {a for o in self.spec.operands for a in o.axes} - set(IDLE_AXES.get(self.spec.name, ""))
        shapes = loads.decodes if self.weights or self.spec.name == "attention" else loads.others
        if "T" in letters:  # else it sees only the rows that sample
            shapes += loads.prefills + (loads.long if self.spec.name == "attention" else ())
        distinct: dict[tuple[object, ...], StepShape] = {}
        for s in shapes:
            if s.context <= longest:
                distinct.setdefault(tuple(shape_of(self.spec, self.axes | s.env).items()), s)
        return tuple(distinct.values())

    def options(self) -> Mapping[str, Options]:
        return SAMPLING.get(self.spec.name, {"": {}})


def families(programs: Iterable[Program]) -> list[Family]:
    """The distinct calls of a step's programs, already lowered for the device, in order of first use."""
    found: dict[tuple[object, ...], Family] = {}
    for call in (c for program in programs for c in program.on_one_rank().calls):
        axes = {a: n for a, n in call.axes.items() if isinstance(n, int)}
        dtypes = {name: _held_dtype(call, name) for name in call.tensors}
        attrs = {k: 0 if k == "layer" else v for k, v in call.attrs.items()}
        key = (call.spec.name, *(tuple(sorted(d.items())) for d in (axes, dtypes, attrs)))
        seen = found.get(key, Family(call.spec, axes, dtypes, attrs, 0))
        found[key] = replace(seen, calls=seen.calls + 1)
    return list(found.values())


def family_key(call: OpCall) -> FamilyKey:
    """As Family.key, of one of its calls in any program of the model."""
    return _family_key(call.spec, {a: n for a, n in call.axes.items() if isinstance(n, int)})


def _family_key(spec: OpSpec, axes: Mapping[str, int]) -> FamilyKey:
    idle = IDLE_AXES.get(spec.name, "")
    return spec.name, tuple(sorted((a, n) for a, n in axes.items() if a not in idle))


def _held_dtype(call: OpCall, name: str) -> str:
    """As the kernels see it: norms and tables become float32 when they are loaded, whatever the file has."""
    t = call.tensors[name]
    constant = t.kind is Kind.WEIGHT and call.spec.operand(name).role is not Role.WEIGHT
    return "f32" if constant else t.dtype


@dataclass(frozen=True)
class Pages:
    """Blocks of a KV pool, dealt out to a step's rows in no order; a different set each `turn`."""

    blocks: Array  # [N], a permutation
    block_size: int

    def table(self, shape: StepShape, turn: int) -> Array:
        """[R, ceil(context / S)] int32."""
        each = blocks_of(shape, self.block_size)
        need = shape.rows * each
        start = turn % max(1, len(self.blocks) // need) * need
        return i32(self.blocks[start : start + need].reshape(shape.rows, each))

    def slots(self, shape: StepShape, turn: int) -> Array:
        """Places of the step's tokens: [T] int32."""
        where = positions_of(shape).reshape(shape.rows, shape.count)
        blocks = np.take_along_axis(self.table(shape, turn), where // self.block_size, axis=1)
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
    options: Options,
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
    if family.weights and most_ids is not None and "V" in sizes:
        sizes["V"] = min(sizes["V"], most_ids)
    arrays: Arrays = {}
    for o in family.spec.operands:
        if o.role in only and o.name in family.dtypes:
            dims = tuple(int(a) if a.isdigit() else sizes[a] for a in o.axes)
            arrays[o.name] = _values(o.name, family.dtypes[o.name], dims, rng, options, o.role)
    if "history" in arrays:
        arrays["history"] = i32(rng.integers(0, sizes.get("V", 1), arrays["history"].shape))
    arrays |= step_inputs(family, shape, Pages(rng.permutation(sizes.get("N", 0)), sizes.get("S", 1)), 0)
    if "ids" in arrays:
        arrays["ids"] = i32(rng.integers(0, sizes["V"], sizes["T"]))
    label = f"{shape.rows} rows of {shape.count}, context {shape.context}"
    return Case(label, sizes, family.attrs, arrays)


def sizes_of(family: Family, shape: StepShape) -> dict[str, int]:
    """Every axis of a call; history as long as the context, no bias, mask or banned tokens."""
    sizes = {**family.axes, **shape.env, **dict.fromkeys("JEUO", 0)}
    if "history" in family.dtypes:
        sizes |= {"Z": shape.rows, "X": shape.context + 1}
    return sizes


def step_inputs(family: Family, shape: StepShape, pages: Pages, turn: int) -> Arrays:
    """What says where a step's rows lie: int32."""
    rows, count = shape.rows, shape.count
    sampled = "logits" in family.dtypes or "history" in family.dtypes
    makers: dict[str, Callable[[], Array]] = {
        "positions": lambda: positions_of(shape),
        "slots": lambda: i32(np.arange(rows)) if sampled else pages.slots(shape, turn),
        "query_starts": lambda: i32(np.arange(rows) * count),
        "query_lens": lambda: np.full(rows, count, np.int32),
        "context_lens": lambda: np.full(rows, shape.context, np.int32),
        "block_table": lambda: pages.table(shape, turn),
        "rows": lambda: i32(np.arange(rows) * count + count - 1),
        "history_lens": lambda: np.full(rows, shape.context, np.int32),
        "prompt_lens": lambda: np.full(rows, shape.context // 2, np.int32),
    }
    return {name: make() for name, make in makers.items() if name in family.dtypes}


def _values(
    name: str, dtype: str, dims: tuple[int, ...], rng: np.random.Generator, options: Options, role: Role
) -> Array:
    if name in options or name in NEUTRAL:
        return np.full(dims, options.get(name, NEUTRAL.get(name, 0)), VALUES.get(dtype, np.float32))
    if name == "cos_sin":
        return rotation_table(dims[0], dims[1], ROPE_THETA)
    if name == "seeds":
        return rng.integers(0, 2**64, dims, dtype=np.uint64)
    if dtype in VALUES or name in SCALARS:
        return np.zeros(dims, VALUES.get(dtype, np.float32))
    values = normal(rng, dims)
    if role is Role.WEIGHT:
        return values * np.float32(dims[-1] ** -0.5)
    if name in ("logits", "scores"):
        return values * np.float32(LOGITS_SPREAD)
    return 1 + values / 4 if role is Role.IN and len(dims) == 1 else values  # gains of norms are near 1


def largest_of(shapes: Iterable[StepShape]) -> dict[str, int]:
    """The greatest T, R and L: what a program over all of them is planned for."""
    envs = [s.env for s in shapes]
    return {a: max(e[a] for e in envs) for a in "TRL"}
