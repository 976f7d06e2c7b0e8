"""Hostile inputs and error bounds of the coarse ops: those of their parts, carried through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.ops.cases.common import (
    LEAST,
    Flavour,
    U,
    i32,
    mixed_rows,
    normal,
    outliers,
    tiny,
    weights,
    zeros,
)
from pegainfer.ops.cases.linear import Dot
from pegainfer.ops.cases.pointwise import rotation_positions, rotation_table
from pegainfer.ops.spec import Arrays, Case

Array = np.ndarray[Any, Any]
SLOPE_OF_SILU = 1.1  # its greatest


def norm_gain(rng: np.random.Generator, width: int) -> Array:
    return 1 + normal(rng, (width,)) / 4


def qkv_cases(rng: np.random.Generator) -> list[Case]:
    """With and without head norms; slots in no order; NaN elsewhere in the pool."""
    # T, M, G, query heads a group, D
    shapes: tuple[tuple[int, int, int, int, int, bool, Flavour], ...] = (
        (1, 32, 1, 1, 32, False, normal),
        (1, 64, 1, 3, 64, False, outliers),
        (5, 96, 2, 4, 64, False, mixed_rows),
        (17, 160, 1, 8, 80, False, normal),
        (3, 128, 2, 2, 96, True, normal),
        (2, 192, 1, 4, 128, True, outliers),
        (2, 64, 1, 2, 256, True, normal),
        (40, 64, 3, 3, 64, False, normal),
        (4, 64, 1, 3, 64, True, zeros),
        (4, 33, 1, 3, 64, False, tiny),
        (3, 256, 1, 2, 64, True, normal),
        (18, 512, 2, 2, 32, False, outliers),
    )
    return [_qkv_case(rng, *shape) for shape in shapes]


def _qkv_case(
    rng: np.random.Generator, t: int, m: int, g: int, group: int, d: int, heads_normed: bool, flavour: Flavour
) -> Case:
    h, block_size, layers, length = g * group, 16, 2, 300
    blocks = -(-t // block_size) + 1
    sizes = {"T": t, "M": m, "H": h, "G": g, "D": d, "A": h * d, "B": g * d, "P": length}
    sizes |= {"N": blocks, "Y": layers, "S": block_size}
    arrays = {
        "kv": np.full((blocks, layers, 2, g, block_size, d), np.nan, np.float32),
        "x": flavour(rng, (t, m)),
        "norm": norm_gain(rng, m),
        "wq": weights(rng, h * d, m),
        "wk": weights(rng, g * d, m),
        "wv": weights(rng, g * d, m),
        "positions": i32(rotation_positions(rng, t, length)),
        "slots": i32(rng.permutation(blocks * block_size)[:t]),
        "cos_sin": rotation_table(length, d, 1e4),
    }
    if heads_normed:
        arrays |= {"q_norm": norm_gain(rng, d), "k_norm": norm_gain(rng, d)}
    label = f"{t}x{m}, {g}x{group} heads of {d}, {flavour.__name__}{', head norms' if heads_normed else ''}"
    return Case(label, sizes, {"eps": 1e-5, "layer": int(rng.integers(layers))}, arrays)


def gated_qkv_cases(rng: np.random.Generator) -> list[Case]:
    """Those of qkv_norm_rope_append with a gate."""
    cases = qkv_cases(rng)
    for case in cases:
        case.arrays["wg"] = weights(rng, case.sizes["A"], case.sizes["M"])
    return cases


def gate_up_cases(rng: np.random.Generator) -> list[Case]:
    # T, M, F
    shapes: tuple[tuple[int, int, int, Flavour], ...] = (
        (1, 32, 5, normal),
        (1, 576, 96, outliers),
        (3, 33, 64, normal),
        (8, 96, 40, mixed_rows),
        (9, 64, 33, normal),
        (70, 32, 17, normal),
        (2, 64, 50, zeros),
        (2, 64, 50, tiny),
        (1, 256, 35, normal),
        (11, 512, 20, mixed_rows),
    )
    return [
        Case(
            f"{t}x{m}, {f} wide, {flavour.__name__}",
            {"T": t, "M": m, "F": f},
            {"eps": 1e-5},
            {
                "x": flavour(rng, (t, m)),
                "norm": norm_gain(rng, m),
                "w_gate": weights(rng, f, m) * np.float32(3),
                "w_up": weights(rng, f, m),
            },
        )
        for t, m, f, flavour in shapes
    ]


def lm_head_cases(rng: np.random.Generator) -> list[Case]:
    """No rows wanted, all, one twice and out of order; NaN in rows that nobody wants."""
    # T, M, V, rows
    shapes: tuple[tuple[int, int, int, list[int], Flavour], ...] = (
        (1, 32, 50, [0], normal),
        (5, 64, 33, [], normal),
        (5, 96, 257, [4, 0, 4], normal),
        (9, 64, 40, list(range(9)), mixed_rows),
        (40, 576, 100, [39], outliers),
        (3, 33, 9, [1], normal),
        (6, 256, 70, [5, 2], outliers),
    )
    cases = []
    for t, m, v, rows, flavour in shapes:
        x = flavour(rng, (t, m))
        x[np.setdiff1d(np.arange(t), rows)] = np.nan
        sizes = {"T": t, "M": m, "V": v, "L": len(rows)}
        arrays = {"x": x, "rows": i32(rows), "norm": norm_gain(rng, m), "w": weights(rng, v, m)}
        cases.append(
            Case(f"{len(rows)} of {t}x{m}, {v} ids, {flavour.__name__}", sizes, {"eps": 1e-5}, arrays)
        )
    return cases


def norm_error(x: Array, gain: Array, eps: float, error: Array | float = 0.0) -> tuple[Array, Array]:
    """rms_norm of x in float64 and its error in float32, where x itself errs by `error`."""
    x64, gain64, width = x.astype(np.float64), np.abs(gain.astype(np.float64)), x.shape[-1]
    rms = np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + eps)
    carried = error + np.abs(x64) / rms * np.max(
        error + np.zeros_like(x64), axis=-1, keepdims=True, initial=0.0
    )
    own = (width / 2 + 8) * U * np.abs(x64) + 2 * LEAST
    return x64 / rms * gain.astype(np.float64), (carried + own) / rms * gain64


def product_error(h: Array, error: Array, w: Array, dot: Dot) -> tuple[Array, Array]:
    """h · wᵀ in float64 and its error, where h errs by `error`."""
    w64 = w.astype(np.float64)
    return h @ w64.T, dot(h, w) + error @ np.abs(w64).T


def qkv_bound(dot: Dot) -> Callable[[Case], Arrays]:
    """Norm, product, head norm where there is one, rotation; v without the last two."""

    def bound(case: Case) -> Arrays:
        a, s, eps = case.arrays, case.sizes, case.attrs["eps"]
        h, h_error = norm_error(a["x"], a["norm"], eps)
        errors = {}
        for name, weight, gain in (("q", "wq", "q_norm"), ("k", "wk", "k_norm"), ("v", "wv", "")):
            value, error = (
                part.reshape(s["T"], -1, s["D"]) for part in product_error(h, h_error, a[weight], dot)
            )
            if gain in a:
                value, error = norm_error(value, a[gain], eps, error)
            if name != "v":
                first, second = np.split(error + 3 * U * np.abs(value), 2, axis=-1)
                error = np.concatenate([first + second] * 2, axis=-1)
            errors[name] = error
        pool = np.zeros(a["kv"].shape)
        block, offset = np.divmod(a["slots"], s["S"])
        for which, name in enumerate("kv"):
            pool[block, case.attrs["layer"], which, :, offset] = errors[name]
        return {"q": errors["q"], "kv": pool}

    return bound


def swiglu_error(gate: Array, gate_error: Array, up: Array, up_error: Array) -> tuple[Array, Array]:
    """silu(g) u and its error.

    It moves by the slope of silu times g's error times |u|, and by |silu(g)| times u's error.
    """
    silu = gate * np.exp(-np.logaddexp(0.0, -gate))
    size = np.abs(silu)
    moved = SLOPE_OF_SILU * gate_error * (np.abs(up) + up_error) + size * up_error
    return silu * up, moved + 16 * U * size * np.abs(up)


def gated_qkv_bound(dot: Dot) -> Callable[[Case], Arrays]:
    def bound(case: Case) -> Arrays:
        h, error = norm_error(case.arrays["x"], case.arrays["norm"], case.attrs["eps"])
        return {**qkv_bound(dot)(case), "gate": product_error(h, error, case.arrays["wg"], dot)[1]}

    return bound


def gate_up_bound(dot: Dot) -> Callable[[Case], Arrays]:

    def bound(case: Case) -> Arrays:
        a = case.arrays
        h, h_error = norm_error(a["x"], a["norm"], case.attrs["eps"])
        gate, gate_error = product_error(h, h_error, a["w_gate"], dot)
        up, up_error = product_error(h, h_error, a["w_up"], dot)
        return {"out": swiglu_error(gate, gate_error, up, up_error)[1]}

    return bound


def lm_head_bound(dot: Dot) -> Callable[[Case], Arrays]:
    def bound(case: Case) -> Arrays:
        a = case.arrays
        h, h_error = norm_error(a["x"][a["rows"]], a["norm"], case.attrs["eps"])
        return {"logits": product_error(h, h_error, a["w"], dot)[1]}

    return bound
