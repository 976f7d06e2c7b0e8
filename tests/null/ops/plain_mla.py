"""Latent attention in float32, token by token, as a straightforward kernel would do it."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32 = np.float32


def normed(x: Array, weight: Array, eps: float) -> Array:
    """Scaled by the row's largest value, as squares may leave float32."""
    top = np.maximum(np.abs(x).max(axis=-1, keepdims=True, initial=0), F32(1e-30))
    y = x / top
    return y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True, dtype=F32) + F32(eps) / top / top) * weight


def rotated(x: Array, cos_sin: Array) -> Array:
    cos, sin = np.split(cos_sin, 2, axis=-1)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def head_linear(a: dict[str, Array]) -> None:
    rows, width = a["w"].shape[1:]
    for h, w in enumerate(a["w"]):
        a["out"][:, h, :rows] = a["a"][:, h, :width] @ w.T
    a["out"][..., rows:] = a["a"][..., width:]


def rope_tail(x: Array, positions: Array, cos_sin: Array) -> None:
    kept = x.shape[-1] - cos_sin.shape[1]
    x[..., kept:] = rotated(x[..., kept:], cos_sin[positions][:, None])


def append(a: dict[str, Array], layer: int, eps: float) -> None:
    rank, size = len(a["norm"]), a["kv"].shape[2]
    for t, slot in enumerate(a["slots"]):
        row = a["kv"][slot // size, layer, slot % size]
        row[:rank] = normed(a["latent"][t, :rank], a["norm"], eps)
        row[rank:] = rotated(a["latent"][t, rank:], a["cos_sin"][a["positions"][t]])


def attention(a: dict[str, Array], layer: int, scale: float) -> None:
    """One pass over blocks of rows with a running maximum."""
    q, kv, out = a["q"], a["kv"], a["out"]
    size, rank = kv.shape[2], out.shape[2]
    for row, context in enumerate(a["context_lens"]):
        first, count = a["query_starts"][row], a["query_lens"][row]
        for t in range(first, first + count):
            seen = int(context) - (first + count - 1 - t)
            top = np.full(q.shape[1], -np.inf, F32)
            total, acc = np.zeros(q.shape[1], F32), np.zeros((q.shape[1], rank), F32)
            for i in range(-(-seen // size)):
                page = kv[a["block_table"][row, i], layer, : seen - i * size].astype(F32)
                s = q[t] @ page.T * F32(scale)
                new = np.maximum(top, s.max(axis=1))
                p, shrink = np.exp(s - new[:, None]), np.exp(top - new)
                total, top = total * shrink + p.sum(axis=1), new
                acc = acc * shrink[:, None] + p @ page[:, :rank]
            out[t] = acc / total[:, None]


def qkv(a: dict[str, Array], eps: float, latent_eps: float, layer: int) -> None:
    h = normed(a["x"], a["norm"], eps)
    append(a | {"latent": h @ a["w_latent"].T, "norm": a["latent_norm"]}, layer, latent_eps)
    if "wq_down" in a:
        h = normed(h @ a["wq_down"].T, a["q_norm"], latent_eps)
    a["q"][...] = (h @ a["wq"].T).reshape(a["q"].shape)
    rope_tail(a["q"], a["positions"], a["cos_sin"])


def layer(a: dict[str, Array], layer: int, scale: float) -> None:
    """Each head's keys and values expanded from the latents: what absorption must be equal to."""
    rank = a["w_k"].shape[1]
    for row, context in enumerate(a["context_lens"]):
        first, count = a["query_starts"][row], a["query_lens"][row]
        blocks = a["block_table"][row, : -(-int(context) // a["kv"].shape[2])]
        rows = a["kv"][blocks, layer].reshape(-1, a["kv"].shape[3])[: int(context)].astype(F32)
        for h in range(a["q"].shape[1]):
            keys = np.concatenate([rows[:, :rank] @ a["w_k"][h], rows[:, rank:]], axis=1)
            values = rows[:, :rank] @ a["w_v"][h].T
            for t in range(first, first + count):
                seen = int(context) - (first + count - 1 - t)
                s = keys[:seen] @ a["q"][t, h] * F32(scale)
                p = np.exp(s - s.max())
                a["out"][t, h] = p / p.sum() @ values[:seen]
