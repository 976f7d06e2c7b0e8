"""Every declaration is complete, and its inputs fit it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pegainfer.ops.coarse
import pegainfer.ops.fused
import pegainfer.ops.fused_delta
import pegainfer.ops.fused_mla
import pegainfer.ops.fused_norm
import pegainfer.ops.lora_layers
import pegainfer.ops.reduce
import pegainfer.ops.sample  # noqa: F401  both declare
from pegainfer.contract.errors import OpError
from pegainfer.ops.check import suitable_cases
from pegainfer.ops.compose import STAGED, dtype_name, one_call
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import FUSED, REGISTRY, Cost, OpSpec, Role, declare, declare_fused
from pegainfer.ops.tensor import Kind, Tensor

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
    """Outputs are written and weights are read once, but for tables and stacks, of which a part is taken."""
    for case in suitable_cases(spec, 3):
        call = call_of(spec, case.sizes, case.arrays, case.attrs)
        cost = call.cost(case.sizes)
        assert isinstance(cost.bytes, int) and isinstance(cost.flops, int)
        moved = [
            call.tensors[o.name].nbytes(case.sizes)
            for o in spec.operands
            if o.name in call.tensors and (o.role is Role.WEIGHT and o.name != "table" and len(o.axes) == 2)
        ]
        assert cost.bytes >= sum(moved) and cost.flops >= 0
        busy = all(case.sizes.get(x, 1) for x in "TL")
        assert cost.bytes > 0 or not busy


def cost_at(spec: OpSpec, sizes: dict[str, int]) -> Cost:
    """Of a call with all its operands, whatever relation between sizes the op requires."""
    tensors = {
        o.name: Tensor(
            o.name, tuple(int(a) if a.isdigit() else sizes[a] for a in o.axes), o.dtypes[0], Kind.INPUT
        )
        for o in spec.operands
    }
    return OpCall(spec, tensors, {}, {}).cost(sizes)


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
    # 2 tokens with 2 experts each of 9: 4 matrices [5, 3] for gate and for up
    "expert_gate_up": (
        {"T": 2, "N": 9, "K": 2, "M": 3, "F": 5},
        4 * (2 * 2 * 5 + 2 * 3 + 2 * 2 + 2 * 4 * 5 * 3),
        4 * 2 * 2 * 3 * 5,
    ),
    # 5 tokens with 2 experts each of 4: all of them
    "expert_down": (
        {"T": 5, "N": 4, "K": 2, "M": 3, "F": 5},
        4 * (5 * 3 + 5 * 2 * 5 + 2 * 5 * 2 + 4 * 3 * 5),
        2 * 5 * 2 * 3 * (5 + 1),
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


def test_a_fused_form_reads_cached_tokens_and_no_whole_pool() -> None:
    sizes = {"T": 3, "H": 2, "E": 4, "D": 4, "N": 9, "Y": 2, "G": 1, "S": 4, "R": 2, "W": 3, "P": 50}
    spec = FUSED["append_attention"]
    cost = cost_at(spec, sizes | {"C": 10, "Q": 12})
    # heads in and out, 10 cached tokens read, keys and values of 3 tokens written
    assert cost.bytes == 4 * (3 * 4 * 4 + 3 * 2 * 4 + (10 + 3) * 2 * 4)
    assert cost.flops == 4 * 12 * 2 * 4


def test_quantised_weights_cost_their_blocks() -> None:
    sizes = {"T": 1, "N": 4, "K": 64}
    call = one_call(REGISTRY["linear"], sizes, {"out": "f32", "a": "f32", "w": "q4_1"}, {}).calls[0]
    assert call.cost(sizes).bytes == 4 * 4 + 64 * 4 + 4 * 2 * 20


def test_a_name_is_declared_once() -> None:
    with pytest.raises(OpError, match="op linear is declared twice"):
        declare(REGISTRY["linear"])
    with pytest.raises(OpError, match="declared twice"):
        declare_fused(REGISTRY["linear"])


class Read(dict[str, int]):
    """Sizes that note which letters were asked for."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self.letters: set[str] = set()

    def __getitem__(self, letter: str) -> int:
        self.letters.add(letter)
        return super().__getitem__(letter)

    def get(self, letter: str, default: Any = None) -> Any:
        self.letters.add(letter)
        return super().get(letter, default)


every_form = pytest.mark.parametrize("spec", [*SPECS, *FORMS], ids=lambda s: s.name)


def letters_of(spec: OpSpec) -> set[str]:
    return {a for o in spec.operands for a in o.axes if not a.isdigit()}


@every_form
def test_costs_read_the_axes_of_operands_and_those_declared_beside_them(spec: OpSpec) -> None:
    sizes = dict.fromkeys(letters_of(spec) | {"C", "Q"}, 64)
    flops, moved = Read(sizes), Read(sizes)
    spec.flops(flops)
    if spec.bytes is not None:
        spec.bytes(moved, {o.name: 1 << 20 for o in spec.operands})
    assert (flops.letters | moved.letters) - letters_of(spec) == set(spec.cost_axes)


# The cost counts the whole room of a row's history, of which a step reads what is known.
CAPACITY = {"adjust_logits": "X", "adjust_some_logits": "X", "sample": "X"}


@every_form
def test_idle_axes_are_axes_and_cost_nothing(spec: OpSpec) -> None:
    assert set(spec.idle) <= letters_of(spec)
    sizes = dict.fromkeys(letters_of(spec) | {"C", "Q"}, 64)
    for letter in set(spec.idle) - set(CAPACITY.get(spec.name, "")):
        assert cost_at(spec, sizes) == cost_at(spec, sizes | {letter: 128}), letter


@every_form
def test_indices_say_what_they_number_and_settings_name_operands(spec: OpSpec) -> None:
    for o in spec.operands:
        assert not o.into or o.dtypes == ("i32",), o.name
        assert all(len(letter) == 1 and letter.isupper() for letter in o.into)
        assert o.fill is None or o.role is Role.IN, "only what a step reads is filled"
    for given in spec.settings.values():
        assert all(spec.operand(name).role is Role.IN for name in given)
    assert spec.settings


def test_fused_forms_keep_what_their_parts_declare() -> None:
    assert FUSED["append_attention"].cost_axes == REGISTRY["attention"].cost_axes
    assert set(REGISTRY["attention"].idle) <= set(FUSED["append_attention"].idle)
    assert FUSED["adjust_some_logits"].idle == REGISTRY["adjust_logits"].idle
    assert FUSED["scaled_qkv_rope_append"].idle == REGISTRY["qkv_norm_rope_append"].idle


def test_only_recurrences_are_sequential() -> None:
    """Tokens of other ops can be compared one by one: the checker of large calls does so."""
    found = {s.name for s in SPECS if s.sequential}
    assert found == {"causal_conv_silu", "gated_delta_rule", "gated_delta"}
    for spec in (*SPECS, *FORMS):
        states = any(o.into == ("N",) and o.axes == ("R",) for o in spec.operands)
        assert spec.sequential == states, spec.name
