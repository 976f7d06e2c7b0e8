"""Formulas of the gated delta rule (arXiv:2412.06464) before its recurrence, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def key_heads(channels: int, heads: int, key_dim: int, value_dim: int) -> int:
    """Key heads G of F = 2 · G · K + H · V channels; 0 where no number of them fits and divides H."""
    keys, rest = divmod(channels - heads * value_dim, 2 * key_dim)
    return keys if rest == 0 and keys > 0 and heads % keys == 0 else 0


def split_heads(qkv: Array, heads: int, key_dim: int, value_dim: int) -> tuple[Array, Array, Array]:
    """q, k: [T, G, K], v: [T, H, V] of [T, F], in float64."""
    tokens, keys = len(qkv), key_heads(qkv.shape[1], heads, key_dim, value_dim)
    wide = qkv.astype(np.float64)
    q, k, v = np.split(wide, [keys * key_dim, 2 * keys * key_dim], axis=1)
    shape = (tokens, keys, key_dim)
    return q.reshape(shape), k.reshape(shape), v.reshape(tokens, heads, value_dim)


def unit_keys(x: Array, eps: float, heads: int) -> Array:
    """Each key head over its length, once for each value head that shares it: [T, H, K] of [T, G, K]."""
    normed = x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + eps)
    return np.repeat(normed, heads // x.shape[1], axis=1)


def sigmoid(x: Array) -> Array:
    result: Array = np.exp(-np.logaddexp(0.0, -x))
    return result


def log_decay(a: Array, a_log: Array, dt_bias: Array) -> Array:
    """g = -e^a_log · softplus(a + dt_bias): [T, H], never positive."""
    dt = np.logaddexp(0.0, a.astype(np.float64) + dt_bias.astype(np.float64))
    g: Array = -np.exp(a_log.astype(np.float64)) * dt
    return g
