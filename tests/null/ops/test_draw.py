"""The arithmetic of a draw: published random numbers, weights, cuts by brute force, the distribution."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.ops.draw import (
    EXP2_BITS,
    EXP2_COEFFICIENTS,
    GREEDY_BELOW,
    WEIGHT_BITS,
    draw_id,
    kept_ids,
    philox4x32,
    random_fraction,
    weights_of,
)

ALL_ONES = 0xFFFFFFFF

# Known answers of philox4x32-10, from Random123's examples/kat_vectors (D. E. Shaw Research, 1.09).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: object
) -> None:
    assert philox4x32(counter, key) == words


def test_random_fraction_places_seed_and_counter() -> None:
    assert random_fraction(0, 0) == 0xE169C58D6627E8D5
    words = philox4x32((5, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert random_fraction(0x0123456789ABCDEF, 5) == words[1] << 32 | words[0]


def test_random_fractions_are_uniform_along_draws_and_seeds() -> None:
    """Chi-square over 64 cells, 63 degrees of freedom: 110 is passed once in 4,000 by a fair generator."""
    for stream in (
        [random_fraction(12345, i) for i in range(6400)],
        [random_fraction(i, 0) for i in range(6400)],
        [random_fraction(i << 32, 7) for i in range(6400)],
    ):
        counts = np.bincount([f >> 58 for f in stream], minlength=64)
        assert ((counts - 100.0) ** 2 / 100).sum() < 110


def test_fixed_point_exponential() -> None:
    """Relative error of the polynomial over its whole domain; exact at 0, never above 1."""
    fraction = np.linspace(0, 2**EXP2_BITS - 2**7, 100_001).astype(np.uint64)
    value = np.full(fraction.shape, EXP2_COEFFICIENTS[-1], np.uint64)
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        value = np.uint64(coefficient) - (value * fraction >> np.uint64(EXP2_BITS))
    want = 2.0 ** (-fraction.astype(np.float64) / 2**EXP2_BITS)
    assert np.abs(value / 2.0**EXP2_BITS / want - 1).max() < 5e-9
    assert int(value[0]) == 2**EXP2_BITS and (np.diff(value.astype(np.int64)) <= 0).all()


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 0.01, 0.7, 1.0, 5.0, 1e30])
def test_weights_are_the_softmax(temperature: float) -> None:
    scores = np.random.default_rng(0).normal(0, 4, 4096).astype(np.float32)
    scores[17] = -np.inf
    weights = weights_of(scores, temperature)
    p = np.exp((scores.astype(np.float64) - scores.max()) / np.float64(np.float32(temperature)))
    assert int(weights.max()) == 2**WEIGHT_BITS and int(weights[17]) == 0
    np.testing.assert_allclose(weights / 2.0**WEIGHT_BITS, p, rtol=4e-6, atol=2.0**-WEIGHT_BITS)


def test_weights_of_scores_at_the_ends_of_float32() -> None:
    big = float(np.finfo(np.float32).max)
    weights = weights_of(np.array([big, -big, np.nextafter(np.float32(big), np.float32(0))], np.float32), 1.0)
    assert weights.tolist() == [2**WEIGHT_BITS, 0, 0]


def brute_force(scores: list[float], weights: list[int], k: int, p: float, m: float) -> list[int]:
    """Ids that may be drawn, in id order, with fractions instead of shifts."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if k > 0:
        order = order[:k]
    if p < 1:
        total, mass, prefix = sum(weights[i] for i in order), 0, []
        for i in order:
            prefix.append(i)
            mass += weights[i]
            # the share is cut to a whole number of weight units
            if mass >= int(Fraction(p) * total):
                break
        order = prefix
    return sorted(i for i in order if weights[i] >= int(Fraction(m) * 2**WEIGHT_BITS))


SCORES = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-20, 20, width=32), st.just(float("-inf"))),
    min_size=1,
    max_size=40,
).filter(lambda s: max(s) > float("-inf"))


@given(
    SCORES,
    st.integers(-1, 45),
    st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(2.0**-10, 1, width=32)),
    st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(2.0**-10, 1, width=32)),
    st.sampled_from([0.25, 1.0, 3.0]),
)
def test_cuts_are_those_of_brute_force(scores: list[float], k: int, p: float, m: float, t: float) -> None:
    s = np.array(scores, np.float32)
    weights = weights_of(s, t)
    kept = kept_ids(s, weights, k, p, m)
    assert sorted(kept.tolist()) == brute_force(s.tolist(), weights.tolist(), k, p, m)
    assert kept[0] == int(np.argmax(s)), "the best token always stays"


@given(SCORES, st.integers(0, 2**64 - 1))
def test_draw_is_the_first_id_whose_sum_exceeds_the_share(scores: list[float], fraction: int) -> None:
    s = np.array(scores, np.float32)
    weights = weights_of(s, 1.0)
    kept = kept_ids(s, weights, 0, 1.0, 0.0)
    sums = list(accumulate(weights.tolist()))
    threshold = fraction * sums[-1] // 2**64
    drawn = draw_id(weights, kept, fraction)
    assert drawn == next(i for i, mass in enumerate(sums) if mass > threshold)
    assert weights[drawn] > 0


def test_ends_of_the_uniform() -> None:
    s = np.zeros(5, np.float32)
    weights = weights_of(s, 1.0)
    kept = kept_ids(s, weights, 0, 1.0, 0.0)
    assert [draw_id(weights, kept, f) for f in (0, 2**64 - 1, 2**64 // 5 - 1, 2**64 // 5 + 2**25)] == [
        0,
        4,
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("k", "p", "m"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (6, 0.9, 0.1)]
)
def test_frequencies_follow_the_cut_softmax(k: int, p: float, m: float) -> None:
    """Chi-square of 4,000 draws over at most 12 ids: 35 is passed once in 4,000 at 11 degrees of freedom."""
    s = np.array([1.0, 0.2, -1.0, 2.0, 0.2, -3.0, 1.5, 0.0, 0.9, -0.4, 0.3, 1.1], np.float32)
    t = 0.8
    weights = weights_of(s, t)
    kept = kept_ids(s, weights, k, p, m)
    drawn = np.bincount(
        [draw_id(weights, kept, random_fraction(99, i)) for i in range(4000)], minlength=len(s)
    )
    want = np.zeros(len(s))
    want[kept] = np.exp(s[kept] / t)
    want *= 4000 / want.sum()
    assert (drawn[want == 0] == 0).all()
    inside = want > 0
    assert ((drawn - want)[inside] ** 2 / want[inside]).sum() < 35
