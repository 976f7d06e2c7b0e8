"""Rotary position embedding (arXiv:2104.09864) in the half-split form of Hugging Face's llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.contract.errors import UnsupportedError
from pegainfer.ops.cases.pointwise import rope_bound, rope_cases
from pegainfer.ops.spec import INTS, In, InOut, OpSpec, Tolerance, declare

Array = np.ndarray[Any, Any]


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Array:
    """Angular frequency of each pair: [D/2] float64, radians a token.

    Args:
        scaling: `rope_scaling` of the model's config; None or rope_type 'default' for none, else 'llama3'
            (transformers `_compute_llama3_parameters`) or 'linear'.
    """
    freqs = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return freqs
    if kind == "linear":
        return freqs / float(scaling["factor"])
    if kind != "llama3":
        raise UnsupportedError("unknown rope scaling", expected="default, linear or llama3", got=kind)
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * freqs / (2 * math.pi)  # full turns within the trained context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freqs * ((1 - smooth) / factor + smooth)


def cos_sin_table(num_positions: int, freqs: Array) -> Array:
    """[P, D] float32: cosines of each pair, then sines. Angles are float32, as in transformers."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * freqs.astype(np.float32)[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def _rope(x: Array, positions: Array, cos_sin: Array) -> None:
    half = x.shape[-1] // 2
    cos, sin = (
        cos_sin[positions][:, None, part].astype(np.float64) for part in (slice(half), slice(half, None))
    )
    first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    x[..., :half], x[..., half:] = first * cos - second * sin, second * cos + first * sin


ROPE = declare(
    OpSpec(
        name="rope",
        doc="rotates the pairs (i, i + D/2) of each head by positions[t] · frequency[i]",
        operands=(InOut("x", "T H D"), In("positions", "T", INTS), In("cos_sin", "P D", ("f32",))),
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
