"""Hostile inputs and error bounds of the mixture of experts: router, grouped products, the whole block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.ops.cases.common import (
    LEAST,
    Flavour,
    U,
    equal,
    huge,
    i32,
    mixed_rows,
    normal,
    outliers,
    tiny,
    weights,
    zeros,
)
from pegainfer.ops.cases.fused import norm_error, norm_gain, product_error, swiglu_error
from pegainfer.ops.cases.linear import Dot, dot_f32
from pegainfer.ops.routing import LEAST_SUM, choose_experts, expert_gates, expert_scores
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
ErrorAndValue = tuple[Array, Array]

# Routers of Qwen3-MoE, DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3, with small numbers of groups.
QWEN = {"sigmoid": False, "renormalize": True, "scale": 1.0, "groups": 1, "kept_groups": 1}
LITE = QWEN | {"renormalize": False}
GROUPED = LITE | {"scale": 16.0, "groups": 4, "kept_groups": 2}
BIASED = {"sigmoid": True, "renormalize": True, "scale": 2.5, "groups": 4, "kept_groups": 2}
UNGROUPED = BIASED | {"groups": 1, "kept_groups": 1}
ROUTERS = {"qwen": QWEN, "lite": LITE, "grouped": GROUPED, "biased": BIASED, "ungrouped": UNGROUPED}
CLEAR = 0.05  # by which a chosen expert's logit leads, as a share of their spread, where activations round


def route_cases(rng: np.random.Generator) -> list[Case]:
    """All routers; ties, one expert ahead of all, infinite and NaN logits."""
    # T, N, K, router, flavour
    shapes: list[tuple[int, int, int, str, Flavour]] = [
        (t, n, k, router, normal)
        for router in ROUTERS
        for t, n, k in ((1, 128, 8), (3, 8, 3), (9, 16, 1), (70, 64, 6))
    ]
    shapes += [(0, 8, 2, "qwen", normal), (2, 1, 1, "ungrouped", normal), (4, 16, 8, "biased", normal)]
    shapes += [(5, 24, 4, r, f) for r in ("qwen", "lite", "grouped") for f in (huge, tiny, zeros, equal)]
    shapes += [(5, 24, 4, r, f) for r in ("biased", "ungrouped") for f in (zeros, tiny)]
    shapes += [(6, 512, 10, "qwen", mixed_rows), (6, 33, 33, "qwen", outliers)]
    cases = [_route_case(rng, *shape) for shape in shapes]
    for router in ("qwen", "biased"):
        case = _route_case(rng, 7, 16, 3, router, normal)
        logits = case.arrays["logits"]
        logits[0, 5], logits[2, :], logits[3, 3:] = np.nan, np.nan, -np.inf
        logits[4, 9], logits[5, ::2] = 80, logits[5, 1]
        if router == "qwen":  # an infinite sigmoid would tie with those that round to 1
            logits[6, 2] = np.inf
        cases.append(Case(f"{case.label} with NaN, infinities and ties", *_rest(case)))
    return cases


def _rest(case: Case) -> tuple[dict[str, int], dict[str, Any], Arrays]:
    return case.sizes, case.attrs, case.arrays


def _route_case(rng: np.random.Generator, t: int, n: int, k: int, router: str, flavour: Flavour) -> Case:
    arrays: Arrays = {"logits": flavour(rng, (t, n)) * np.float32(2 if flavour is normal else 1)}
    if ROUTERS[router]["sigmoid"]:
        arrays["bias"] = normal(rng, (n,)) / 4
        if flavour is zeros:  # every expert ties
            arrays["bias"][:] = arrays["bias"][0]
    label = f"{k} of {n} experts, {t} tokens, {router} {flavour.__name__}"
    return Case(label, {"T": t, "N": n, "K": k}, dict(ROUTERS[router]), arrays)


def _choices(rng: np.random.Generator, t: int, n: int, k: int, how: str) -> Array:
    """[T, K] distinct experts, ascending; `how` they spread."""
    if how == "one expert":  # all tokens meet the same experts, the others none
        picked = np.tile(np.sort(rng.permutation(n)[:k]), (t, 1))
    else:
        picked = np.sort(np.argsort(rng.random((t, n)), axis=1)[:, :k], axis=1)
    if how == "absent":
        picked = np.where(rng.random((t, k)) < 0.4, -1, picked)
    return i32(picked)


# T, experts, chosen, M, F, how experts are chosen, flavour
SHAPES: tuple[tuple[int, int, int, int, int, str, Flavour], ...] = (
    (1, 8, 2, 64, 40, "spread", normal),
    (1, 128, 8, 32, 32, "spread", normal),
    (3, 4, 4, 96, 17, "spread", normal),
    (17, 6, 2, 33, 48, "spread", normal),
    (40, 5, 1, 64, 96, "one expert", normal),
    (150, 3, 2, 32, 32, "one expert", normal),
    (70, 16, 3, 64, 33, "absent", normal),
    (5, 300, 2, 32, 64, "spread", normal),
    (2, 1, 1, 32, 64, "spread", normal),
    (0, 4, 2, 32, 32, "spread", normal),
    (9, 4, 2, 256, 256, "spread", normal),
    (3, 5, 3, 512, 256, "spread", outliers),
    (12, 4, 2, 64, 64, "spread", mixed_rows),
    (4, 4, 2, 64, 32, "spread", zeros),
    (4, 4, 2, 64, 64, "absent", tiny),
)


def _expert_case(
    t: int, n: int, k: int, m: int, f: int, how: str, flavour: Flavour, attrs: dict[str, Any], arrays: Arrays
) -> Case:
    label = f"{k} of {n} experts {m}x{f}, {t} tokens, {how}, {flavour.__name__}"
    return Case(label, {"T": t, "N": n, "K": k, "M": m, "F": f}, attrs, arrays)


def _stack(rng: np.random.Generator, n: int, rows: int, columns: int) -> Array:
    return np.stack([weights(rng, rows, columns) for _ in range(n)])


def expert_gate_up_cases(rng: np.random.Generator) -> list[Case]:
    """Every expert busy, one busy, some tokens without expert."""
    return [
        _expert_case(
            t, n, k, m, f, how, flavour, {},
            {
                "h": flavour(rng, (t, m)),
                "experts": _choices(rng, t, n, k, how),
                "w_gate": _stack(rng, n, f, m),
                "w_up": _stack(rng, n, f, m),
            },
        )
        for t, n, k, m, f, how, flavour in SHAPES
    ]  # fmt: skip


def expert_down_cases(rng: np.random.Generator) -> list[Case]:
    return [
        _expert_case(
            t, n, k, m, f, how, flavour, {},
            {
                "act": flavour(rng, (t, k, f)),
                "experts": _choices(rng, t, n, k, how),
                "gates": np.abs(normal(rng, (t, k))),
                "w_down": _stack(rng, n, m, f),
            },
        )
        for t, n, k, m, f, how, flavour in SHAPES
    ]  # fmt: skip


def moe_cases(rng: np.random.Generator) -> list[Case]:
    """Tokens whose choice of experts is clear, or a tie of zeros: rounding must not change it."""
    # T, experts, chosen, M, F, router, flavour
    shapes: tuple[tuple[int, int, int, int, int, str, Flavour], ...] = (
        (1, 8, 2, 64, 48, "qwen", normal),
        (5, 8, 3, 32, 40, "lite", normal),
        (20, 4, 1, 64, 33, "qwen", normal),
        (3, 8, 2, 64, 32, "grouped", normal),
        (4, 8, 2, 96, 32, "biased", normal),
        (7, 6, 2, 256, 256, "ungrouped", normal),
        (4, 8, 2, 64, 32, "qwen", zeros),
        (0, 4, 2, 32, 32, "qwen", normal),
    )
    cases = []
    for t, n, k, m, f, router, flavour in shapes:
        arrays = {
            "x": np.empty((t, m), np.float32),
            "norm": norm_gain(rng, m),
            "w_router": normal(rng, (n, m)) * np.float32(2 * m**-0.5),
            "w_gate": _stack(rng, n, f, m),
            "w_up": _stack(rng, n, f, m),
            "w_down": _stack(rng, n, m, f),
        }
        attrs = {"eps": 1e-6, **ROUTERS[router]}
        if attrs["sigmoid"]:
            arrays["bias"] = normal(rng, (n,)) / 8
        for row in arrays["x"]:
            row[...] = flavour(rng, (m,))
            while flavour is normal and not _is_clear(row, arrays, attrs, k):
                row[...] = flavour(rng, (m,))
        cases.append(_expert_case(t, n, k, m, f, router, flavour, attrs, arrays))
    return cases


def _is_clear(x: Array, arrays: Arrays, attrs: dict[str, Any], count: int) -> bool:
    """Whether neither a slightly larger nor a slightly smaller logit of any expert changes the choice."""
    h, _ = norm_error(x[None], arrays["norm"], attrs["eps"])
    logits = h @ arrays["w_router"].T.astype(np.float64)
    step = CLEAR * logits.std() * np.eye(logits.shape[1])
    tries = np.concatenate([logits, logits + step, logits - step])
    chosen = _chosen(tries, expert_scores(tries, use_sigmoid=attrs["sigmoid"]), arrays, attrs, count)
    return bool((chosen == chosen[0]).all())


def _chosen(logits: Array, scores: Array, arrays: Arrays, attrs: dict[str, Any], count: int) -> Array:
    return choose_experts(logits, scores, arrays.get("bias"), count, attrs["groups"], attrs["kept_groups"])


def choices_of(case: Case) -> Array:
    """The experts that tokens of a case of `moe` go to: [T, K], ascending."""
    a, attrs = case.arrays, case.attrs
    h, _ = norm_error(a["x"], a["norm"], attrs["eps"])
    logits = h @ a["w_router"].T.astype(np.float64)
    scores = expert_scores(logits, use_sigmoid=attrs["sigmoid"])
    return _chosen(logits, scores, a, attrs, case.sizes["K"])


def _gates_error(logits: Array, logits_error: Array, gates: Array, attrs: dict[str, Any]) -> Array:
    """|error| of gates [T, K]: exponentials of float32 differences, sums, divisions, and the logits' own.

    A score's relative error is at most that of its logit plus, in a softmax, that of the sum.
    """
    finite = np.where(np.isfinite(logits), np.abs(logits.astype(np.float64)), 0)
    spread = np.minimum(2 * finite.max(axis=1, keepdims=True, initial=0), 200)  # beyond it e^-x is 0
    moved = logits_error.max(axis=1, keepdims=True, initial=0)
    relative = 4 * moved + (2 * spread + logits.shape[1] + 32) * U
    least = LEAST / (LEAST_SUM if attrs["renormalize"] else 1) * attrs["scale"]
    error: Array = relative * np.abs(gates) + least
    return error


def route_bound(case: Case) -> Arrays:
    a, attrs = case.arrays, case.attrs
    scores = expert_scores(a["logits"], use_sigmoid=attrs["sigmoid"])
    chosen = _chosen(a["logits"], scores, a, attrs, case.sizes["K"])
    gates = expert_gates(scores, chosen, attrs["scale"], renormalize=attrs["renormalize"])
    return {"gates": _gates_error(a["logits"], np.zeros_like(scores), gates, attrs)}


def _gate_up_of(
    h: Array, h_error: Array, experts: Array, w_gate: Array, w_up: Array, dot: Dot
) -> ErrorAndValue:
    """act and its error: [T, K, F]."""
    shape = (*experts.shape, w_gate.shape[1])
    act, error = np.zeros(shape), np.zeros(shape)
    for expert in range(len(w_gate)):
        at = np.nonzero(experts == expert)
        rows, rows_error = h[at[0]].astype(np.float64), h_error[at[0]]
        gate, gate_error = product_error(rows, rows_error, w_gate[expert], dot)
        up, up_error = product_error(rows, rows_error, w_up[expert], dot)
        act[at], error[at] = swiglu_error(gate, gate_error, up, up_error)
    return act, error


def _down_error(
    act: Array, act_error: Array, experts: Array, gates: Array, gates_error: Array, w_down: Array, dot: Dot
) -> Array:
    """|error| of the weighted sum: [T, M]."""
    total, wide = np.zeros((len(act), w_down.shape[1])), gates.astype(np.float64)
    for expert in range(len(w_down)):
        at = np.nonzero(experts == expert)
        value, error = product_error(act[at].astype(np.float64), act_error[at], w_down[expert], dot)
        gate, gate_error = np.abs(wide[at])[:, None], gates_error[at][:, None]
        own = (gates.shape[1] + 2) * U * gate * np.abs(value)
        np.add.at(total, at[0], (gate + gate_error) * error + gate_error * np.abs(value) + own)
    return total


def expert_gate_up_bound(dot: Dot) -> Callable[[Case], Arrays]:
    def bound(case: Case) -> Arrays:
        a = case.arrays
        exact = np.zeros(a["h"].shape)
        return {"act": _gate_up_of(a["h"], exact, a["experts"], a["w_gate"], a["w_up"], dot)[1]}

    return bound


def expert_down_bound(dot: Dot) -> Callable[[Case], Arrays]:
    def bound(case: Case) -> Arrays:
        a = case.arrays
        exact = np.zeros(a["act"].shape), np.zeros(a["gates"].shape)
        return {"out": _down_error(a["act"], exact[0], a["experts"], a["gates"], exact[1], a["w_down"], dot)}

    return bound


def held_ids(experts: Array, first: int, count: int) -> Array:
    """Places of experts among those held, first … first + count; -1 where one is not held."""
    held: Array = np.where((experts >= first) & (experts < first + count), experts - first, -1)
    return held


def moe_bound(case: Case) -> Arrays:
    """The errors of the parts, each carried through what follows it; also of `moe_shard`."""
    a, attrs = case.arrays, case.attrs
    h, h_error = norm_error(a["x"], a["norm"], attrs["eps"])
    logits, logits_error = product_error(h, h_error, a["w_router"], dot_f32)
    scores = expert_scores(logits, use_sigmoid=attrs["sigmoid"])
    chosen = _chosen(logits, scores, a, attrs, case.sizes["K"])
    gates = expert_gates(scores, chosen, attrs["scale"], renormalize=attrs["renormalize"])
    gates_error = _gates_error(logits, logits_error, gates, attrs)
    held = held_ids(chosen, attrs.get("first", 0), len(a["w_gate"]))
    act, act_error = _gate_up_of(h, h_error, held, a["w_gate"], a["w_up"], dot_f32)
    return {"out": _down_error(act, act_error, held, gates, gates_error, a["w_down"], dot_f32)}
