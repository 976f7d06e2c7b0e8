"""Formulas of a mixture of experts' router, in float64: which experts a token goes to, and with what weight.

Sources: softmax routers of Qwen3-MoE (arXiv:2505.09388) and DeepSeek-V2 (arXiv:2405.04434, groups), sigmoid
routers with a correction bias of DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.recurrence import sigmoid

Array = np.ndarray[Any, Any]
LEAST_SUM = 1e-20  # added to the sum that gates are divided by, as DeepSeek-V3 does


def expert_scores(logits: Array, *, use_sigmoid: bool) -> Array:
    """The score of each expert: [T, N] of logits [T, N]. A row with NaN has NaN in all of a softmax."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if use_sigmoid:
            return sigmoid(wide)
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    result: Array = powers / powers.sum(axis=1, keepdims=True)
    return result


def choose_experts(
    logits: Array, scores: Array, bias: Array | None, count: int, groups: int, kept_groups: int
) -> Array:
    """The `count` best experts of each token in ascending order: [T, count].

    A softmax or sigmoid keeps the order of its logits, so without a bias the logits themselves are compared:
    scores that are equal only by rounding do not tie. With a bias, score + bias is compared. NaN counts as
    -inf; of equals the expert with the lower number is taken.

    A token chooses among the `kept_groups` best of `groups` equal groups. A group is as good as its best
    expert, or with a bias as the sum of its two best.
    """
    rank = logits.astype(np.float64) if bias is None else scores + bias.astype(np.float64)
    rank = np.where(np.isnan(rank), -np.inf, rank)
    tokens, experts = rank.shape
    assert count <= kept_groups * (experts // groups), "more experts are chosen than the groups have"
    if kept_groups < groups:
        by_group = np.sort(rank.reshape(tokens, groups, -1), axis=2)
        merit = by_group[:, :, -1] if bias is None else by_group[:, :, -2:].sum(axis=2)
        kept = np.argsort(-merit, axis=1, kind="stable")[:, :kept_groups]
        in_kept = (np.arange(experts) // (experts // groups) == kept[:, :, None]).any(axis=1)
    else:
        in_kept = np.ones(rank.shape, bool)
    # lexsort is stable and sorts by its last key first.
    order = np.lexsort((-rank, ~in_kept), axis=1)
    return np.sort(order[:, :count], axis=1)


def expert_gates(scores: Array, chosen: Array, scale: float, *, renormalize: bool) -> Array:
    """The weight of each chosen expert: [T, count], its score, or its share of the chosen ones' scores."""
    gates = np.take_along_axis(scores, chosen, axis=1)
    if renormalize:
        gates = gates / (gates.sum(axis=1, keepdims=True) + LEAST_SUM)
    result: Array = gates * scale
    return result
