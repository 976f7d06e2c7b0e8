"""Every declaration is complete, and its inputs fit it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.fused
import pegainfer.ops.fused_norm
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401  both declare
from pegainfer.contract.errors import OpError
from pegainfer.ops.check import suitable_cases
from pegainfer.ops.compose import STAGED, dtype_name, one_call
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import FUSED, REGISTRY, OpSpec, Role, declare, declare_fused

SPECS = sorted(REGISTRY.values(), key=lambda s: s.name)
FORMS = sorted(FUSED.values(), key=lambda s: s.name)
every_op = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
GLOSSARY = (Path(__file__).parents[3] / "GLOSSARY.md").read_text()


def call_of(
    spec: OpSpec, sizes: dict[str, int], arrays: dict[str, np.ndarray], attrs: dict[str, object]
) -> OpCall:
    """A case's call, bound; outputs take their first dtype."""
    dtypes = {name: dtype_name(a) for name, a in arrays.items()}
    dtypes |= {o.name: o.dtypes[0] for o in spec.operands if o.role is Role.OUT}
    return one_call(spec, sizes, dtypes, attrs).calls[-1]


@every_op
def test_is_complete(spec: OpSpec) -> None:
    assert spec.doc and not spec.doc.endswith(".")
    assert (spec.reference is None) == spec.coarse, "a reference, or what it is made of"
    assert spec.cases is not None and "f32" in spec.tolerance
    assert all(t.reason for t in spec.tolerance.values())
    roles = [o.role for o in spec.operands]
    written = [r in (Role.OUT, Role.INOUT, Role.STATE) for r in roles]
    assert written[0], "outputs stand first"
    assert not any(r is Role.IN for r in roles[: roles.index(Role.OUT)]) if Role.OUT in roles else True


@pytest.mark.parametrize("spec", [*SPECS, *FORMS], ids=lambda s: s.name)
def test_letters_are_in_the_glossary(spec: OpSpec) -> None:
    letters = {a for o in spec.operands for a in o.axes if not a.isdigit()}
    table = re.findall(r"^\| ([A-Z](?:, [A-Z])*) \|", GLOSSARY, re.MULTILINE)
    assert letters <= {letter for row in table for letter in row.split(", ")}


@every_op
def test_cases_fit_and_repeat(spec: OpSpec) -> None:
    cases, again = suitable_cases(spec, 3), suitable_cases(spec, 3)
    assert len({c.label for c in cases}) == len(cases) >= 5
    for case, twin in zip(cases, again, strict=True):
        for name, a in case.arrays.items():
            assert a.flags.c_contiguous and a.tobytes() == twin.arrays[name].tobytes()
            shape = tuple(int(x) if x.isdigit() else case.sizes[x] for x in spec.operand(name).axes)
            assert a.shape == shape, f"{name} of {case.label}"
            assert dtype_name(a) in spec.operand(name).dtypes
        wanted = {o.name for o in spec.operands if o.role is not Role.OUT and not o.optional}
        assert wanted <= set(case.arrays), "every operand that is read has an array"
        call_of(spec, case.sizes, case.arrays, case.attrs)  # binds, or raises OpError


@every_op
def test_another_seed_gives_other_values(spec: OpSpec) -> None:
    pairs = zip(suitable_cases(spec, 3), suitable_cases(spec, 4), strict=True)
    assert any(a.arrays[n].tobytes() != b.arrays[n].tobytes() for a, b in pairs for n in a.arrays)


@every_op
def test_costs_are_at_least_what_must_move(spec: OpSpec) -> None:
    """Outputs are written and weights (but for tables, of which rows are taken) are read once."""
    for case in suitable_cases(spec, 3):
        call = call_of(spec, case.sizes, case.arrays, case.attrs)
        cost = call.cost(case.sizes)
        assert isinstance(cost.bytes, int) and isinstance(cost.flops, int)
        moved = [
            call.tensors[o.name].nbytes(case.sizes)
            for o in spec.operands
            if o.name in call.tensors and (o.role is Role.WEIGHT and o.name != "table")
        ]
        assert cost.bytes >= sum(moved) and cost.flops >= 0
        busy = all(case.sizes.get(x, 1) for x in "TL")
        assert cost.bytes > 0 or not busy


# Of calls small enough to count by hand: sizes, bytes, FLOPs.
COSTS = {
    "linear": ({"T": 2, "N": 3, "K": 5}, 4 * (2 * 3 + 2 * 5 + 3 * 5), 2 * 2 * 3 * 5),
    "linear_residual": ({"T": 2, "N": 3, "K": 5}, 4 * (2 * 2 * 3 + 2 * 5 + 3 * 5), 2 * 2 * 3 * 5 + 2 * 3),
    "rms_norm": ({"T": 2, "M": 3}, 4 * (2 * 2 * 3 + 3), 4 * 2 * 3),
    "embedding": ({"T": 2, "M": 3, "V": 100}, 4 * (2 * 2 * 3 + 2), 0),
    "rope": ({"T": 2, "H": 3, "D": 4, "P": 50}, 4 * (2 * 2 * 3 * 4 + 2 + 2 * 4), 3 * 2 * 3 * 4),
    "kv_append": ({"T": 2, "N": 9, "Y": 2, "G": 1, "S": 4, "D": 3}, 4 * (2 * 2 * 2 * 3 + 2), 0),
    # 2 rows read and write 3 kept inputs of 6 channels; 3 tokens of 6 in and out, 4 taps
    "causal_conv_silu": (
        {"T": 3, "F": 6, "N": 9, "Y": 2, "X": 3, "W": 4, "R": 2},
        4 * (2 * 3 * 6 + 4 * 6 + 2 * 2 * 3 * 6),
        3 * 6 * (2 * 4 + 4),
    ),
    # 2 rows read and write 2 heads of 4x5; 3 tokens of 2 · 1 · 4 + 2 · 5 in and 2 · 5 out, 2 gates a head
    "gated_delta_rule": (
        {"T": 3, "F": 18, "N": 9, "Y": 2, "H": 2, "K": 4, "V": 5, "R": 2},
        4 * (3 * 18 + 3 * 10 + 2 * 3 * 2 + 2 * 2 * 2 * 4 * 5),
        7 * 3 * 2 * 4 * 5,
    ),
    # C = 10 cached tokens of one layer, one KV head of 4, keys and values; Q = 12 pairs, 2 heads
    "attention": (
        {"T": 3, "H": 2, "D": 4, "N": 9, "Y": 2, "G": 1, "S": 4, "R": 2, "W": 3, "C": 10, "Q": 12},
        4 * (2 * 3 * 2 * 4 + 10 * 2 * 4),
        4 * 12 * 2 * 4,
    ),
}


@pytest.mark.parametrize("name", sorted(COSTS))
def test_costs_by_hand(name: str) -> None:
    sizes, moved, flops = COSTS[name]
    spec = REGISTRY[name]
    dtypes = {o.name: o.dtypes[0] for o in spec.operands}
    program = one_call(spec, sizes, dtypes, {a: 0 for a in spec.attrs})
    cost = program.calls[-1].cost(sizes)
    assert (cost.bytes, cost.flops) == (moved, flops)
    assert all(
        t.name.endswith(STAGED) or t.name in dtypes or t.name == "staged_rows" for t in program.tensors()
    )


def test_quantised_weights_cost_their_blocks() -> None:
    sizes = {"T": 1, "N": 4, "K": 64}
    call = one_call(REGISTRY["linear"], sizes, {"out": "f32", "a": "f32", "w": "q4_1"}, {}).calls[0]
    assert call.cost(sizes).bytes == 4 * 4 + 64 * 4 + 4 * 2 * 20


def test_a_name_is_declared_once() -> None:
    with pytest.raises(OpError, match="op linear is declared twice"):
        declare(REGISTRY["linear"])
    with pytest.raises(OpError, match="declared twice"):
        declare_fused(REGISTRY["linear"])
