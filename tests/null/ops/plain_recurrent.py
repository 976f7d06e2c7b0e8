"""The recurrent ops in plain float32, as a straightforward kernel would do them; each writes its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
F32 = np.float32


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, F32(-88), F32(88))))


def rows(a: dict[str, Array]) -> Iterator[tuple[int, bool, range]]:
    """(state, whether it starts from zeros, tokens) of each row that has a state and tokens."""
    given = zip(a["state_ids"], a["query_starts"], a["query_lens"], a["context_lens"], strict=True)
    for state, first, count, context in given:
        if state >= 0 and count:
            yield int(state), bool(context == count), range(first, first + count)


def conv(a: dict[str, Array], layer: int) -> None:
    """Token by token with a window that moves."""
    a["out"][...] = 0
    pool = a["conv"][:, layer]
    for state, fresh, tokens in rows(a):
        window = np.zeros_like(pool[state]) if fresh else pool[state].copy()
        for t in tokens:
            window = np.concatenate([window, a["x"][t : t + 1]])
            y = (a["taps"] * window).sum(axis=0, dtype=F32)
            a["out"][t], window = y * sigmoid(y), window[1:]
            if a["state_saves"][t] >= 0:
                pool[a["state_saves"][t]] = window
        pool[state] = window


def delta_rule(a: dict[str, Array], layer: int, eps: float, tiled: int) -> None:
    """Value head by value head, each with its key head."""
    a["out"][...] = 0
    heads, key_dim, value_dim = a["delta"].shape[2:]
    keys = (a["qkv"].shape[1] - heads * value_dim) // 2
    group = heads * key_dim // keys
    g = -np.exp(a["a_log"]) * np.logaddexp(F32(0), a["a"] + a["dt_bias"])
    decay, beta = np.exp(g), sigmoid(a["b"])
    for state, fresh, tokens in rows(a):
        for h in range(heads):
            pool = a["delta"][:, layer, h]
            s = np.zeros_like(pool[state]) if fresh else pool[state].copy()
            for t in tokens:
                at = (h % (keys // key_dim) if tiled else h // group) * key_dim
                q, k = (a["qkv"][t, at + start : at + start + key_dim] for start in (0, keys))
                q, k = (x / np.sqrt((x * x).sum(dtype=F32) + F32(eps)) for x in (q, k))
                v = a["qkv"][t, 2 * keys + h * value_dim :][:value_dim]
                s = s * decay[t, h]
                s = s + np.outer(k, beta[t, h] * (v - k @ s))
                a["out"][t, h] = (q * F32(key_dim**-0.5)) @ s
                if a["state_saves"][t] >= 0:
                    pool[a["state_saves"][t]] = s
            pool[state] = s


def layer(a: dict[str, Array], norm: Callable[[Array, Array, float], Array], **attrs: Any) -> None:
    """All of a layer of linear attention up to its output projection. `norm`: of x, by weight and epsilon."""
    h = norm(a["x"], a["norm"], attrs["eps"])
    z, gates = h @ a["w_z"].T, {"a": h @ a["w_a"].T, "b": h @ a["w_b"].T}
    convolved, mixed = np.empty_like(h, shape=(len(h), len(a["w_qkv"]))), np.empty_like(a["out"])
    conv(a | {"x": h @ a["w_qkv"].T, "out": convolved}, attrs["layer"])
    rule = a | gates | {"qkv": convolved, "out": mixed}
    delta_rule(rule, attrs["layer"], attrs["key_eps"], attrs["tiled"])
    z = z.reshape(mixed.shape)
    a["out"][...] = norm(mixed, a["out_norm"], attrs["eps"]) * z * sigmoid(z)
