"""Hostile inputs and the error bound of a whole layer of linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from pegainfer.ops.cases.common import (
    Flavour,
    U,
    mixed_rows,
    normal,
    outliers,
    tiny,
    weights,
    zeros,
)
from pegainfer.ops.cases.fused import norm_error, norm_gain, product_error
from pegainfer.ops.cases.linear import Dot
from pegainfer.ops.cases.recurrent import (
    ROW_SETS,
    Rows,
    conv_bound,
    delta_bound,
    state_pool,
    step_rows,
)
from pegainfer.ops.delta import CAUSAL_CONV_SILU, GATED_DELTA_RULE
from pegainfer.ops.norm import GATED_RMS_NORM
from pegainfer.ops.spec import Arrays, Case, OpSpec, run_op
from pegainfer.ops.stored import plain

Array = np.ndarray[Any, Any]
DRAWS = 4  # of errors of random signs
FLOOR = 1e-25  # results are of order 1, or 1e-17; a gate may be flushed to zero where it makes one so small
MARGIN = 4.0  # an element's error may be so much more than the greatest that the draws give its head
PARTS = {"qkv": "w_qkv", "z": "w_z", "a": "w_a", "b": "w_b"}
ROWS = ("state_ids", "state_saves", "query_starts", "query_lens", "context_lens")


def gated_delta_cases(rng: np.random.Generator) -> list[Case]:
    """Rows of one token and of many; heads that share keys; the head size of real models and others."""
    # rows, M, key heads, value heads a key head, K, V, taps
    kinds: tuple[tuple[Rows, int, tuple[int, int, int, int], int, Flavour], ...] = (
        (ROW_SETS[0], 64, (1, 2, 128, 128), 4, normal),
        (ROW_SETS[1], 96, (2, 1, 128, 128), 4, normal),
        (ROW_SETS[2], 64, (2, 2, 128, 128), 4, normal),
        (ROW_SETS[2], 32, (1, 3, 128, 128), 4, outliers),
        (ROW_SETS[3], 40, (2, 4, 16, 16), 4, normal),
        (ROW_SETS[4], 64, (1, 2, 32, 48), 4, normal),
        (ROW_SETS[5], 32, (1, 2, 128, 64), 4, mixed_rows),
        (ROW_SETS[6], 64, (2, 2, 128, 128), 4, normal),
        (ROW_SETS[7], 33, (1, 1, 16, 32), 3, normal),
        (ROW_SETS[2], 64, (1, 2, 128, 128), 4, zeros),
        (ROW_SETS[1], 64, (1, 4, 128, 128), 4, tiny),
        (ROW_SETS[8], 64, (1, 2, 128, 128), 4, normal),
    )
    return [_case(rng, *kind) for kind in kinds]


def _case(
    rng: np.random.Generator, r: Rows, width: int, heads: tuple[int, int, int, int], taps: int, x: Flavour
) -> Case:
    keys, group, key_dim, value_dim = heads
    h, layer, tiled = keys * group, int(rng.integers(3)), int(rng.integers(2))
    sizes, arrays, read = step_rows(rng, r)
    channels = 2 * keys * key_dim + h * value_dim
    sizes |= {"M": width, "H": h, "K": key_dim, "V": value_dim, "F": channels, "A": h * value_dim}
    sizes |= {"W": taps, "X": taps - 1}
    arrays |= {
        "conv": state_pool(rng, sizes, read, layer, (taps - 1, channels)),
        "delta": state_pool(rng, sizes, read, layer, (h, key_dim, value_dim)),
        "x": x(rng, (sizes["T"], width)),
        "norm": norm_gain(rng, width),
        "w_qkv": weights(rng, channels, width),
        "w_z": weights(rng, h * value_dim, width),
        "w_a": weights(rng, h, width),
        "w_b": weights(rng, h, width),
        "taps": normal(rng, (taps, channels)),
        "a_log": np.log(rng.uniform(0.01, 16, h)).astype(np.float32),
        "dt_bias": np.log(np.expm1(rng.uniform(0.001, 0.1, h))).astype(np.float32),
        "out_norm": norm_gain(rng, value_dim),
    }
    label = f"{r.label}, {width} wide, {keys}x{group} heads of {key_dim}x{value_dim}, {x.__name__}"
    label += ", tiled" if tiled else ""
    return Case(label, sizes, {"layer": layer, "eps": 1e-6, "key_eps": 1e-6, "tiled": tiled}, arrays)


def gated_delta_bound(dot: Dot) -> Callable[[Case], Arrays]:
    """What errors of the projections, and the parts' own, do to the result, by trial.

    The layer is computed with each part's result moved by its bound, with random signs. Normalised keys can
    make a small error great, so that no bound in closed form is both safe and of use.
    """

    def bound(case: Case) -> Arrays:
        h, error = norm_error(case.arrays["x"], case.arrays["norm"], case.attrs["eps"])
        products = {name: product_error(h, error, case.arrays[w], dot) for name, w in PARTS.items()}
        trial = _Trial(case, {name: value for name, (value, _) in products.items()})
        rng = np.random.default_rng(7)
        most = {name: np.zeros(a.shape) for name, a in trial.want.items()}
        for _ in range(DRAWS):
            moved = {n: _moved(v, e, rng) for n, (v, e) in products.items()}
            for name, a in trial.layer(moved, rng).items():
                most[name] = np.fmax(most[name], np.abs(a - trial.want[name]))
        conv = np.zeros(case.arrays["conv"].shape)
        run_op(CAUSAL_CONV_SILU, np.empty(products["qkv"][1].shape), conv, products["qkv"][1],
               case.arrays["taps"], *trial.rows, layer=case.attrs["layer"])  # fmt: skip
        width, columns = case.sizes["V"], most["delta"].max(axis=-2, keepdims=True)
        own = (width / 2 + 24) * U * np.abs(trial.want["out"]) + FLOOR
        return {
            "out": MARGIN * most["out"].max(axis=-1, keepdims=True) + own,
            "conv": conv,
            "delta": MARGIN * np.broadcast_to(columns, most["delta"].shape),
        }

    return bound


def _moved(values: Array, errors: Array, rng: np.random.Generator) -> Array:
    result: Array = values + rng.choice((-1, 1), values.shape) * errors
    return result


class _Trial:
    """The layer behind its projections, in float64, and how much its parts err by themselves."""

    def __init__(self, case: Case, parts: Arrays) -> None:
        """`parts`: the projections by name."""
        self._case = case
        self.rows = [case.arrays[name] for name in ROWS]
        self._errors: dict[str, Arrays] = {}
        self.want = self.layer(parts, None)

    def layer(self, parts: Arrays, rng: np.random.Generator | None) -> Arrays:
        """`out`, and `delta` where a row has written it.

        Args:
            rng: draws signs of the errors; None: results are exact, and errors are noted.
        """
        a, s, attrs = self._case.arrays, self._case.sizes, self._case.attrs
        gates = {"a": parts["a"], "b": parts["b"], "a_log": a["a_log"], "dt_bias": a["dt_bias"]}
        convolved, mixed, out = np.empty(parts["qkv"].shape), *np.empty((2, s["T"], s["H"], s["V"]))
        conv = {"conv": a["conv"].astype(np.float64), "x": parts["qkv"], "taps": a["taps"]}
        key = {"layer": attrs["layer"]}
        convolved = self._run(CAUSAL_CONV_SILU, convolved, conv, key, conv_bound, rng)
        rule = {"delta": plain(a["delta"]).astype(np.float64), "qkv": convolved, **gates}
        key |= {"eps": attrs["key_eps"], "tiled": attrs["tiled"]}
        mixed = self._run(GATED_DELTA_RULE, mixed, rule, key, delta_bound, rng)
        run_op(GATED_RMS_NORM, out, mixed, parts["z"].reshape(out.shape), a["out_norm"], eps=attrs["eps"])
        return {"out": out, "delta": np.nan_to_num(rule["delta"])}

    def _run(
        self, spec: OpSpec, out: Array, given: Arrays, attrs: dict[str, Any],
        bound: Callable[[Case], Arrays], rng: np.random.Generator | None,
    ) -> Array:  # fmt: skip
        """Returns the op's `out` and writes its state, the first of `given`."""
        if rng is None:
            arrays = {name: a.copy() for name, a in given.items()} | dict(zip(ROWS, self.rows, strict=True))
            self._errors[spec.name] = bound(replace(self._case, arrays=arrays, attrs=attrs))
        run_op(spec, out, *given.values(), *self.rows, **attrs)
        if rng is None:
            return out
        errors, state = self._errors[spec.name], next(iter(given))
        if state in errors:
            given[state][...] = _moved(given[state], errors[state], rng)
        return _moved(out, errors["out"], rng)
