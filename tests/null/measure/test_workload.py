"""A model's distinct calls, and the inputs that a bench gives them: valid, and the same for every device."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import pegainfer.ops.reduce  # noqa: F401  (declares)
from pegainfer.measure.step_shapes import CPU_STEP_SIZES, StepShape
from pegainfer.measure.workload import (
    Family,
    Pages,
    blocks_of,
    case,
    families,
    largest_of,
    positions_of,
)
from pegainfer.models.llama.forward import forward, groups, shapes
from pegainfer.ops.check import check_case, suitable_cases, through_program
from pegainfer.ops.compose import run_reference
from pegainfer.ops.program import Program
from pegainfer.ops.reference import ReferenceExecutor
from pegainfer.ops.sampler import sampler
from pegainfer.ops.spec import REGISTRY, STEP_AXES, OpSpec
from pegainfer.runner.program import Formats, Sizes
from tests.support import awkward

CONFIG = replace(awkward.CONFIG, num_layers=3)
LONGEST = CONFIG.max_position_embeddings


def programs() -> list[Program]:
    formats = {name: "q4_1" if len(shape) == 2 else "f32" for name, shape in shapes(CONFIG).items()}
    coarse = forward(CONFIG, formats, Sizes(groups(CONFIG, 16, Formats()), (100,), LONGEST), Formats())
    return [
        coarse,
        sampler(CONFIG.vocab_size, CONFIG.vocab_size, 8, LONGEST + 1, 20).lowered(lambda call: False),
    ]


FAMILIES = families(programs())
REFERENCE = through_program(
    lambda program, weights, states, inputs, sizes: ReferenceExecutor(
        program, {**{k: w.values() for k, w in weights.items()}, **states}
    ).run(inputs, sizes)
)


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.spec.name == name)


def test_calls_that_differ_in_layer_and_weights_are_one_family() -> None:
    assert [(f.spec.name, f.calls) for f in FAMILIES] == [
        ("embedding", 1),
        ("qkv_norm_rope_append", 3),
        ("attention", 3),
        ("linear_residual", 3),  # the attention's output
        ("gate_up_swiglu", 3),
        ("linear_residual", 3),  # the feed-forward block's
        ("lm_head", 1),
        ("adjust_logits", 1),
        ("sample_tokens", 1),
        ("token_logprobs", 1),
        ("append_tokens", 1),
    ]


def test_formats_are_those_of_matrices_and_pages() -> None:
    assert family("lm_head").formats == {"w": "q4_1"}
    assert family("attention").formats == {"kv": "f32"}
    assert family("sample_tokens").formats == {}


def test_a_steps_sizes_count_tokens_and_pairs() -> None:
    assert StepShape(4, 1, 100).env == {"T": 4, "R": 4, "L": 4, "C": 400, "Q": 400}
    assert StepShape(1, 3, 3).env == {"T": 3, "R": 1, "L": 1, "C": 3, "Q": 6}  # 1 + 2 + 3
    assert StepShape(2, 2, 10).env["Q"] == 2 * (9 + 10)


def test_ops_of_sampling_rows_have_no_prefill_and_no_context_is_too_long() -> None:
    assert {s.count for s in family("lm_head").step_shapes(LONGEST, CPU_STEP_SIZES)} == {1}
    assert {s.count for s in family("linear_residual").step_shapes(LONGEST, CPU_STEP_SIZES)} == {1, 128, 512}
    assert max(s.context for s in family("attention").step_shapes(8192, CPU_STEP_SIZES)) == 8192
    assert max(s.context for s in family("attention").step_shapes(LONGEST, CPU_STEP_SIZES)) == 512


def test_programs_are_planned_for_the_greatest_sizes() -> None:
    assert largest_of([StepShape(16, 1, 128), StepShape(1, 512, 512)]) == {"T": 512, "R": 16, "L": 16}


def test_rows_share_no_block_and_turns_take_other_blocks() -> None:
    shape = StepShape(3, 1, 40)
    pages = Pages(np.random.default_rng(0).permutation(20), 16)
    first, second, again = (pages.table(shape, turn) for turn in range(3))
    assert first.shape == (3, 3) == (3, blocks_of(shape, 16))
    assert len({*first.ravel(), *second.ravel()}) == 18
    assert (again == first).all()  # two blocks are left over: too few for a third set


def test_slots_are_where_the_table_says() -> None:
    shape = StepShape(2, 5, 20)
    pages = Pages(np.random.default_rng(1).permutation(9), 16)
    table, slots = pages.table(shape, 1), pages.slots(shape, 1).reshape(2, 5)
    assert positions_of(shape).tolist() == [15, 16, 17, 18, 19] * 2
    assert slots[1].tolist() == [table[1, 0] * 16 + 15, *(table[1, 1] * 16 + i for i in range(4))]


@pytest.mark.parametrize("f", FAMILIES, ids=lambda f: f.spec.name)
@pytest.mark.parametrize("shape", [StepShape(1, 1, 33), StepShape(3, 1, 20), StepShape(1, 7, 19)], ids=str)
def test_cases_fit_their_op_and_pass_its_checker(f: Family, shape: StepShape) -> None:
    """The checker run on the reference itself: a case must not hold what the reference cannot read."""
    for options in f.options().values():
        made = case(f, shape, options, seed=3, most_ids=64)
        report = check_case(f.spec, made, REFERENCE, dtypes=f.formats)
        assert report.faults == ()


def declared_family(spec: OpSpec) -> Family:
    """A family that is made from the declaration alone, at the sizes of its greatest small case."""
    small = [c for c in suitable_cases(spec, 3) if sum(a.size for a in c.arrays.values()) < 1 << 18]
    picked = max(small, key=lambda c: sum(n for a, n in c.sizes.items() if a not in STEP_AXES))
    dtypes = {o.name: o.dtypes[0] for o in spec.operands if not o.optional or o.name in picked.arrays}
    axes = {a: n for a, n in picked.sizes.items() if a not in STEP_AXES}
    attrs = {k: 0 if k == "layer" else v for k, v in picked.attrs.items()}
    return Family(spec, axes, dtypes, attrs, 1)


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("shape", [StepShape(3, 1, 20), StepShape(2, 7, 19)], ids=str)
def test_every_declared_op_can_be_benched_and_checked(name: str, shape: StepShape) -> None:
    """Nothing but the declaration says which inputs are valid."""
    f = declared_family(REGISTRY[name])
    for settings in f.options().values():
        made = case(f, shape, settings, seed=3)
        for o in f.spec.operands:
            most = int(np.prod([made.sizes.get(a, 1) for a in o.into]))
            if o.into and o.name in made.arrays and made.arrays[o.name].size:
                assert made.arrays[o.name].min() >= -1 and made.arrays[o.name].max() < most, o.name
        report = check_case(f.spec, made, REFERENCE, dtypes=f.formats)
        assert report.faults == ()


def test_rows_of_a_recurrent_op_have_states_of_their_own_and_save_none() -> None:
    f = declared_family(REGISTRY["gated_delta_rule"])
    made = case(f, StepShape(4, 3, 10), {}, 1)
    assert made.arrays["state_ids"].tolist() == [0, 1, 2, 3]
    assert (made.arrays["state_saves"] == -1).all() and made.arrays["delta"].shape[:2] == (4, 1)


def test_cases_are_drawn_from_their_seed() -> None:
    shape = StepShape(2, 1, 20)
    one, same, other = (case(family("linear_residual"), shape, {}, seed) for seed in (1, 1, 2))
    assert all((one.arrays[n] == same.arrays[n]).all() for n in one.arrays)
    assert (one.arrays["w"] != other.arrays["w"]).any()


def test_the_vocabulary_can_be_cut() -> None:
    made = case(family("lm_head"), StepShape(1, 1, 20), {}, 0, most_ids=50)
    assert made.sizes["V"] == 50
    assert made.arrays["w"].shape == (50, CONFIG.hidden_size)
    assert case(family("sample_tokens"), StepShape(1, 1, 20), {}, 0, most_ids=50).sizes["V"] == 203


def test_greedy_takes_the_best_and_temperature_draws() -> None:
    drawn = {}
    for name in ("greedy", "temperature 0.8"):
        f = family("sample_tokens")
        made = case(f, StepShape(16, 1, 20), f.spec.settings[name], 5)
        outputs = {n: np.zeros(16, np.int32) for n in ("tokens", "status")}
        run_reference(f.spec, made.sizes, outputs | made.arrays, made.attrs)
        assert not outputs["status"].any()
        drawn[name] = outputs["tokens"], made.arrays["scores"].argmax(axis=1)
    assert (drawn["greedy"][0] == drawn["greedy"][1]).all()
    assert (drawn["temperature 0.8"][0] != drawn["temperature 0.8"][1]).any()
