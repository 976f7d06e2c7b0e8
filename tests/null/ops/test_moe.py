"""Routing by hand: ties, groups, biases, NaN; and what the tolerance of gates refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.ops.check import Trial, check_case, suitable_cases
from pegainfer.ops.compose import run_reference
from pegainfer.ops.moe import EXPERT_DOWN, MOE, ROUTE_EXPERTS
from pegainfer.ops.spec import run_op
from tests.null.ops import plain_moe

SOFTMAX = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}


def routed(logits: Any, count: int, bias: Any = None, **attrs: Any) -> tuple[list[int], list[float]]:
    """One token's experts and gates."""
    experts, gates = np.full((1, count), -7, np.int32), np.full((1, count), np.nan, np.float32)
    wide = np.array([logits], np.float32)
    given = None if bias is None else np.array(bias, np.float32)
    run_op(ROUTE_EXPERTS, experts, gates, wide, given, **(SOFTMAX | attrs))
    return experts[0].tolist(), gates[0].tolist()


def test_softmax_scores_and_their_shares() -> None:
    logits = np.log([4.0, 1.0, 3.0, 2.0])
    assert routed(logits, 2, renormalize=False) == ([0, 2], pytest.approx([0.4, 0.3]))
    assert routed(logits, 2) == ([0, 2], pytest.approx([4 / 7, 3 / 7]))
    assert routed(logits, 2, scale=2.5) == ([0, 2], pytest.approx([10 / 7, 7.5 / 7]))


def test_ties_go_to_the_lower_number_and_experts_come_in_order() -> None:
    assert routed([1, 2, 2, 2, 0], 2)[0] == [1, 2]
    assert routed([0.0] * 6, 3)[0] == [0, 1, 2]
    assert routed([5, 1, 1, 9], 3)[0] == [0, 1, 3]
    assert routed([0.0, -0.0, 0.0], 2)[0] == [0, 1]


def test_logits_decide_where_probabilities_vanish() -> None:
    """Of two experts whose probability is 0 in float32 the one with the greater logit is taken."""
    assert routed([-500, 0, -400, -300], 2) == ([1, 3], pytest.approx([1, 0]))


def test_the_bias_decides_and_does_not_weigh() -> None:
    logits = [0.0, 0.0, 0.0, np.log(3)]  # sigmoids 1/2, 1/2, 1/2, 3/4
    got = routed(logits, 2, bias=[0, 0.5, 0, 0], sigmoid=True)
    assert got == ([1, 3], pytest.approx([0.4, 0.6]))


def test_a_group_is_as_good_as_its_best_or_with_a_bias_its_two_best() -> None:
    logits = [9, 0, 5, 5, 4, 4, 3, 3]
    both = {"groups": 4, "kept_groups": 2, "renormalize": False}
    assert routed(logits, 3, **both)[0] == [0, 2, 3]
    assert routed(logits, 2, **(both | {"kept_groups": 1}))[0] == [0, 1]
    small = [x / 10 for x in logits]  # sigmoids 0.71 0.5 | 0.62 0.62 | 0.60 0.60 | 0.57 0.57
    chosen = routed(small, 2, bias=[0] * 8, sigmoid=True, groups=4, kept_groups=1)[0]
    assert chosen == [2, 3]
    assert routed([1, 1, 1, 1], 1, groups=2, kept_groups=1)[0] == [0], "equal groups: the first"


def test_nan_is_chosen_last_and_spoils_its_own_row_alone() -> None:
    experts, gates = routed([1, np.nan, 3, 2], 2, sigmoid=True, bias=[0, 0, 0, 0])
    assert experts == [2, 3] and np.isfinite(gates).all()
    experts, gates = routed([1, np.nan, 3, 2], 3)
    assert experts == [0, 2, 3] and np.isnan(gates).all(), "a softmax with NaN in its sum"
    experts, _ = routed([np.nan] * 4, 2)
    assert experts == [0, 1]


def test_more_experts_than_the_groups_have_are_refused() -> None:
    with pytest.raises(AssertionError, match="more experts"):
        routed([0.0] * 8, 3, groups=4, kept_groups=1)


def test_an_expert_that_is_none_adds_nothing() -> None:
    out = np.full((1, 2), np.nan, np.float32)
    act = np.array([[[1, 2], [np.nan, np.nan]]], np.float32)
    w_down = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    experts, gates = np.array([[1, -1]], np.int32), np.array([[2, 5]], np.float32)
    run_op(EXPERT_DOWN, out, act, experts, gates, w_down)
    assert out.tolist() == [[2 * (4 + 10), 2 * (6 + 14)]]


def test_the_block_is_a_weighted_sum_of_dense_blocks() -> None:
    """With all experts chosen and equal, the weights sum to 1: the dense SwiGLU block."""
    rng = np.random.default_rng(0)
    sizes = {"T": 3, "N": 4, "K": 4, "M": 8, "F": 5}
    one = {name: rng.standard_normal(shape) for name, shape in (("g", (5, 8)), ("u", (5, 8)), ("d", (8, 5)))}
    stacks = {k: np.repeat(v[None], 4, axis=0).astype(np.float32) for k, v in one.items()}
    x = rng.standard_normal((3, 8)).astype(np.float32)
    arrays = {
        "out": np.empty((3, 8), np.float32), "experts": np.empty((3, 4), np.int32), "x": x,
        "norm": np.ones(8, np.float32), "w_router": rng.standard_normal((4, 8)).astype(np.float32),
        "w_gate": stacks["g"], "w_up": stacks["u"], "w_down": stacks["d"],
    }  # fmt: skip
    run_reference(MOE, sizes, arrays, {"eps": 0.0, **SOFTMAX})
    h = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True))
    gate, up = h @ one["g"].T, h @ one["u"].T
    want = (gate / (1 + np.exp(-gate)) * up) @ one["d"].T
    np.testing.assert_allclose(arrays["out"], want, rtol=1e-5, atol=1e-5)
    assert arrays["experts"].tolist() == [[0, 1, 2, 3]] * 3


WRONG = {
    "the next expert": lambda a: np.copyto(a["experts"], (a["experts"] + 1) % a["logits"].shape[1]),
    "gates off by a thousandth": lambda a: np.multiply(a["gates"], 1.001, out=a["gates"]),
    "gates in another order": lambda a: np.copyto(a["gates"], a["gates"][:, ::-1].copy()),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_router_is_noticed(fault: str) -> None:
    def run(trial: Trial) -> None:
        with np.errstate(all="ignore"):
            plain_moe.route(trial.arrays, **trial.attrs)
        WRONG[fault](trial.arrays)

    cases = [c for c in suitable_cases(ROUTE_EXPERTS, 12) if "normal" in c.label and c.sizes["T"]]
    cases = [c for c in cases if 1 < c.sizes["K"] < c.sizes["N"]]
    assert len(cases) > 8
    missed = [c.label for c in cases if not check_case(ROUTE_EXPERTS, c, run).faults]
    assert not missed
