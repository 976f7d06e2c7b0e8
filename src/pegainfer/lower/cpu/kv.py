"""How the kernels order a KV cache within a block; conversions from and to the reference's order for tests.

The array is [N, Y, 2, G, S, D] by name, as the reference has it, but what lies within one block and layer is,
for each KV head, K as [S / 16, D, 16] (lanes are tokens) and then V as [S, D]. A cache of latents,
[N, Y, S, D], lies as the reference has it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LATENT_AXES = 4


def from_reference(kv: Array) -> Array:
    """A copy in the kernels' order."""
    if kv.ndim == LATENT_AXES:
        return kv.copy()
    out = np.empty_like(kv)
    keys, values = _parts(out)
    n, y, _, g, s, d = kv.shape
    keys[...] = kv[:, :, 0].reshape(n, y, g, s // 16, 16, d).swapaxes(-1, -2)
    values[...] = kv[:, :, 1]
    return out


def to_reference(kv: Array) -> Array:
    """A copy in the reference's order."""
    if kv.ndim == LATENT_AXES:
        return kv.copy()
    out = np.empty_like(kv)
    keys, values = _parts(kv)
    n, y, _, g, s, d = kv.shape
    out[:, :, 0] = keys.swapaxes(-1, -2).reshape(n, y, g, s, d)
    out[:, :, 1] = values
    return out


def _parts(kv: Array) -> tuple[Array, Array]:
    """Views of an array in the kernels' order: K as [N, Y, G, S / 16, D, 16], V as [N, Y, G, S, D]."""
    n, y, _, g, s, d = kv.shape
    halves = kv.reshape(n, y, g, 2, s * d)
    return (
        halves[:, :, :, 0].reshape(n, y, g, s // 16, d, 16),
        halves[:, :, :, 1].reshape(n, y, g, s, d),
    )
