"""Rotary position embedding (arXiv:2104.09864) in the half-split form of Hugging Face's llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.cases.pointwise import rope_bound, rope_cases
from pegainfer.ops.fill import rotation
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Tolerance, declare

Array = np.ndarray[Any, Any]


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Array:
    """Angular frequency of each pair: [D/2] float64, radians a token.

    Args:
        scaling: `rope_scaling` of the model's config; None or rope_type 'default' for none, else 'linear',
            'llama3' (transformers `_compute_llama3_parameters`) or 'yarn' (arXiv:2309.00071).
    """
    freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = _kind(scaling)
    if scaling is None or kind == "default":
        return freqs
    factor = float(scaling["factor"])
    if kind == "linear":
        return freqs / factor
    if kind == "yarn":
        kept = _yarn_kept(head_dim, theta, scaling)
        return freqs * ((1 - kept) / factor + kept)
    if kind != "llama3":
        raise UnsupportedError("unknown rope scaling", expected="default, linear, llama3 or yarn", got=kind)
    low, high = (float(scaling[k]) for k in ("low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * freqs / (2 * math.pi)  # full turns within the trained context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freqs * ((1 - smooth) / factor + smooth)


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cosines and sines are multiplied by: 1 but for yarn (transformers `_compute_yarn_parameters`).

    Both q and k carry it, so that scores grow by its square.
    """
    if scaling is None or _kind(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = (scaling.get(k) for k in ("factor", "mscale", "mscale_all_dim"))
    assert factor is not None
    if mscale and all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return _magnitude(factor, 1.0)


def score_factor(scaling: Mapping[str, Any] | None) -> float:
    """What models with `mscale_all_dim` (DeepSeek-V2 and later) multiply the softmax scale by.

    m(mscale_all_dim)², with m as in arXiv:2309.00071, equation 22; 1 without yarn or without that number.
    """
    if scaling is None or _kind(scaling) != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _magnitude(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2


def _kind(scaling: Mapping[str, Any] | None) -> str:
    return str((scaling or {}).get("rope_type", (scaling or {}).get("type", "default")))


def _magnitude(factor: float, weight: float) -> float:
    """arXiv:2309.00071, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_kept(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Array:
    """How much of each pair's own frequency stays, [D/2]: 1 for those that turn often, 0 for slow ones."""
    trained = float(scaling["original_max_position_embeddings"])

    def pair_with(turns: float) -> float:
        """The pair, as a real number, that makes so many turns within the trained context."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_with(float(scaling.get("beta_fast") or 32))
    last = pair_with(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers: a step in place of a ramp
    kept: Array = 1 - np.clip((np.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
    return kept


def cos_sin_table(num_positions: int, freqs: Array, factor: float = 1.0) -> Array:
    """[P, D] float32: cosines of each pair, then sines. Angles are float32, as in transformers.

    Args:
        factor: `attention_factor` of the scaling.
    """
    return cos_sin_rows(np.arange(num_positions), freqs, factor)


def cos_sin_rows(positions: Array, freqs: Array, factor: float = 1.0) -> Array:
    """The rows of `cos_sin_table` for these positions."""
    angles = positions.astype(np.float32)[:, None] * freqs.astype(np.float32)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) * np.float32(factor)


def rotate_halves(x: Array, cos_sin: Array) -> Array:
    """The pairs (i, i + D/2) of x's last axis, rotated: float64.

    Args:
        cos_sin: [..., D], rows of `cos_sin_table` for each of x's.
    """
    half = x.shape[-1] // 2
    cos, sin = (cos_sin[..., part].astype(np.float64) for part in (slice(half), slice(half, None)))
    first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rope(x: Array, positions: Array, cos_sin: Array) -> None:
    x[...] = rotate_halves(x, cos_sin[positions][:, None])


ROPE = declare(
    OpSpec(
        name="rope",
        doc="rotates the pairs (i, i + D/2) of each head by positions[t] · frequency[i]",
        operands=(
            InOut("x", "T H D"),
            In("positions", "T", INTS, into="P"),
            In("cos_sin", "P D", ("f32",), fill=rotation),
        ),
        idle="P",
        reference=_rope,
        flops=lambda s: 3 * s["T"] * s["H"] * s["D"],
        bytes=lambda s, held: 2 * held["x"] + held["positions"] + 4 * s["T"] * s["D"],
        cases=rope_cases,
        tolerance={
            "f32": Tolerance(
                0.0, 0.0, "two float32 products and their sum, whose terms may cancel", rope_bound
            )
        },
        requires=(("D even", lambda s: s["D"] % 2 == 0),),
    )
)
