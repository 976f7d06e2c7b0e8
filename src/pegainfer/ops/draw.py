"""The arithmetic of a draw, in whole numbers, so that every backend gives the same token for the same scores.

Floats enter once, as y = (max - score) · (log2(e) / temperature) with each operation rounded to float32.
2^-y becomes a fixed-point weight; sums of weights are then exact in any order, on any number of threads, and
the random number is a 64-bit fraction of their total. There is no boundary noise to allow for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GREEDY_BELOW = 2.0**-20  # the same as in contract.request, which says why; a test compares them
WEIGHT_BITS = 40  # the best token weighs 2^40: a million tokens sum below 2^60
# 2^-f = (a0 - f · (a1 - f · (a2 - …))) / 2^31 for f in [0, 1): relative error 4.8e-9, exact at f = 0
EXP2_COEFFICIENTS = (2147483648, 1488521986, 515877902, 119165494, 20571132, 2737501, 234126)
EXP2_BITS = 31


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words for a counter and a key of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_fraction(seed: int, draw: int) -> int:
    """A uniform in [0, 1), times 2^64: Philox with key (seed's low word, high word), counter (draw, 0, 0, 0).

    The first output word is the low half.

    Args:
        seed: 64 bits.
        draw: how many tokens the sequence has generated so far.
    """
    words = philox4x32((draw & 0xFFFFFFFF, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[1] << 32 | words[0]


def weights_of(scores: Array, temperature: float) -> Array:
    """2^40 · exp((score - max) / temperature), cut to whole numbers: [V] uint64. Scores: [V] float32, finite
    or -inf, at least one finite; temperature ≥ GREEDY_BELOW.
    """
    cold = np.float32(math.log2(math.e) / float(temperature))
    with np.errstate(over="ignore"):
        y = np.minimum((scores.max() - scores) * cold, np.float32(64))
    whole = np.floor(y)
    fraction = ((y - whole) * np.float32(1 << EXP2_BITS)).astype(np.uint64)
    mantissa = np.full(y.shape, EXP2_COEFFICIENTS[-1], np.uint64)
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        mantissa = np.uint64(coefficient) - (mantissa * fraction >> np.uint64(EXP2_BITS))
    shifted = mantissa << np.uint64(WEIGHT_BITS - EXP2_BITS) >> np.minimum(whole, 63).astype(np.uint64)
    weights: Array = np.where(whole < 64, shifted, np.uint64(0))
    return weights


def kept_ids(scores: Array, weights: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Ids that may be drawn, best first (score descending, id ascending; -0 equals 0).

    Args:
        top_k: 0 or less means off.
        top_p: of the weight that top_k left; 1 or more means off; one token stays in any case.
        min_p: of the best token's weight.
    """
    order: Array = np.argsort(-scores, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        sums = np.cumsum(weights[order], dtype=np.uint64)
        need = max(1, int(max(float(top_p), 0.0) * 2.0**64) * int(sums[-1]) >> 64)
        order = order[: int(np.searchsorted(sums, np.uint64(need), "left")) + 1]
    kept: Array = order[weights[order] >= np.uint64(int(float(min_p) * 2.0**WEIGHT_BITS))]
    return kept


def draw_id(weights: Array, kept: Array, fraction: int) -> int:
    """The lowest kept id whose inclusive sum of weights, in id order, exceeds fraction · total / 2^64."""
    ids = np.sort(kept)
    sums = np.cumsum(weights[ids], dtype=np.uint64)
    threshold = fraction * int(sums[-1]) >> 64
    return int(ids[np.searchsorted(sums, np.uint64(threshold), "right")])
